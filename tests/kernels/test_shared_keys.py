"""Which sequences native paged attention takes together, against a search through their block tables as they stand."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from batchinfer.kernels.common import native

CHUNK = 128  # of attention.h
DRIVER = """
#include <cstdio>
#include "sharing.h"

int main() {
    batchinfer::Problem p{};
    std::scanf("%ld %ld %ld %ld", &p.num_seqs, &p.max_blocks, &p.block_size, &p.sliding_window);
    std::vector<int32_t> q_lens(p.num_seqs), starts(1), lens(p.num_seqs), table(p.num_seqs * p.max_blocks);
    for (int32_t& n : q_lens) std::scanf("%d", &n), starts.push_back(starts.back() + n);
    for (int32_t& n : lens) std::scanf("%d", &n);
    for (int32_t& block : table) std::scanf("%d", &block);
    p.cu_seqlens_q = starts.data(), p.seq_lens = lens.data(), p.block_table = table.data();
    batchinfer::Sharing sharing(p);
    for (const auto& group : sharing.groups()) {
        std::printf("%ld", long(group.num_keys));
        for (int64_t sequence : group.sequences) std::printf(" %ld", long(sequence));
        std::printf("\\n");
    }
}
"""
Groups = list[tuple[int, list[int]]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    include = native.KERNELS / "paged_attention"
    command = ["g++", "-std=c++17", "-O0", f"-I{include}", "-o", folder / "driver", folder / "driver.cpp"]
    subprocess.run(command, check=True)
    return folder / "driver"


def groups_of(driver: Path, q_lens: list[int], lens: list[int], tables: list[list[int]], size: int, window=0) -> Groups:
    width = max(map(len, tables))
    padded = [block for table in tables for block in table + [2**31 - 1] * (width - len(table))]
    numbers = [len(lens), width, size, window, *q_lens, *lens, *padded]
    lines = subprocess.run([driver], input=" ".join(map(str, numbers)), capture_output=True, text=True, check=True)
    rows = [list(map(int, line.split())) for line in lines.stdout.splitlines()]
    return [(row[0], sorted(row[1:])) for row in rows]


def keys_in_common(tables: list[list[int]], lens: list[int], rows: list[int], size: int) -> int:
    """Whole chunks of whole blocks that all have, each one's last token left out."""
    keys = 0
    while all(keys // size < (lens[row] - 1) // size for row in rows):
        if len({tables[row][keys // size] for row in rows}) > 1:
            break
        keys += size
    return keys // CHUNK * CHUNK


def most_saved(tables: list[list[int]], lens: list[int], rows: list[int], size: int) -> int:
    """Keys that one group of the rows saves, or groups among those that have more in common."""
    if len(rows) < 2:
        return 0
    common = keys_in_common(tables, lens, rows, size)
    families: list[list[int]] = []
    for row in rows:
        for family in families:
            if keys_in_common(tables, lens, [family[0], row], size) > common:
                family.append(row)
                break
        else:
            families.append([row])
    return max(common * (len(rows) - 1), sum(most_saved(tables, lens, family, size) for family in families))


@pytest.mark.parametrize("seed", range(10))
def test_groups_save_the_most_keys(driver: Path, seed: int) -> None:
    """Sequences fork from each other at random places, and some compute a chunk of a prompt."""
    rng = random.Random(seed)
    size, blocks = rng.choice([8, 16, 64, 80]), iter(range(10**6))
    tables: list[list[int]] = []
    for _ in range(40):
        parent = rng.choice(tables) if tables and rng.random() < 0.8 else []
        shared = parent[: rng.randrange(len(parent) + 1)]
        tables.append(shared + [next(blocks) for _ in range(rng.randrange(1, 900 // size))])
    lens = [len(table) * size - rng.randrange(size) for table in tables]
    q_lens = [1 if rng.random() < 0.9 else 2 for _ in tables]
    rng.shuffle(tables := list(zip(tables, lens, q_lens, strict=True)))
    tables, lens, q_lens = (list(column) for column in zip(*tables, strict=True))
    single = [row for row, count in enumerate(q_lens) if count == 1]

    found = groups_of(driver, q_lens, lens, tables, size)
    assert found
    members = [row for _, rows in found for row in rows]
    assert len(members) == len(set(members))
    assert set(members) <= set(single)
    for keys, rows in found:
        assert 0 < keys == keys_in_common(tables, lens, rows, size)
    assert sum(keys * (len(rows) - 1) for keys, rows in found) == most_saved(tables, lens, single, size)
    assert groups_of(driver, q_lens, lens, tables, size, window=100) == []


def test_a_last_token_is_never_shared(driver: Path) -> None:
    """Its keys come in this step, and each sequence attends to one of its own at least."""
    tables = [[*range(16)], [*range(16), 16]]
    assert groups_of(driver, [1, 1], [256, 257], tables, 16) == [(128, [0, 1])]
    assert groups_of(driver, [1, 1], [257, 257], [[*range(16), 17], tables[1]], 16) == [(256, [0, 1])]
