"""What a reader sees of a report's page: its text, its key figures, its tables; and what a browser would fetch."""

import html.parser
from pathlib import Path

_VOID = {"meta", "br", "link", "img", "input"}


class Page(html.parser.HTMLParser):
    """Of HTML text. tiles: by label, (value, note). attributes: all of (tag, name, value)."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text_parts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.tiles: dict[str, tuple[str, str]] = {}
        self.rows: list[list[str]] = []  # of all tables
        self._path: list[tuple[str, str]] = []  # open (tag, class)
        self._tile: dict[str, str] = {}
        self.feed(source)

    @classmethod
    def read(cls, path: Path) -> "Page":
        return cls(path.read_text(encoding="utf-8"))

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.text_parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        kind = dict(attrs).get("class") or ""
        if tag not in _VOID:
            self._path.append((tag, kind))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif kind == "tile":
            self._tile = {}

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            opened, kind = self._path.pop()
            assert opened == tag, f"</{tag}> closes <{opened}>"
            if kind == "tile":
                self.tiles[self._tile["label"]] = (self._tile["value"], self._tile.get("note", ""))

    def handle_data(self, data: str) -> None:
        tag, kind = self._path[-1] if self._path else ("", "")
        if tag in ("style", "script") or not data.strip():
            return
        self.text_parts.append(data)
        if kind in ("label", "value", "note"):
            self._tile[kind] = data.strip()
        if any(opened in ("td", "th") for opened, _ in self._path):
            self.rows[-1][-1] += data.strip()

    def table_row(self, first: str) -> list[str]:
        """The other cells of the row that begins so."""
        return next(row[1:] for row in self.rows if row[:1] == [first])


def fetched(source: str) -> list[str]:
    """Addresses that a browser would load: of attributes that name resources, and of CSS."""
    page = Page(source)
    names = ("src", "href", "xlink:href", "srcset", "data", "poster", "action")
    found = [value for _, name, value in page.attributes if name in names and not value.startswith("#")]
    found += [value for _, name, value in page.attributes if "://" in value and name not in ("title", "aria-label")]
    return found + [part for part in ("@import", "url(http", "url('", 'url("') if part in source]
