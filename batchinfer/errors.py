"""Error codes of rows, exceptions of jobs and the exit codes of the command line. Imported by every room."""

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """Exit codes of `batchinfer run`."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    TOO_MANY_ERRORS = 3
    INTERRUPTED = 75  # EX_TEMPFAIL: the same command carries on


class ErrorCode(StrEnum):
    """Values of the output column `error_code`."""

    UNREADABLE_LINE = "unreadable_line"
    NULL_PROMPT = "null_prompt"
    EMPTY_PROMPT = "empty_prompt"
    BAD_PROMPT = "bad_prompt"  # a value of the wrong type: a number, malformed messages, ids out of the vocabulary
    TEMPLATE_ERROR = "template_error"
    PROMPT_TOO_LONG = "prompt_too_long"
    BAD_PARAMETER = "bad_parameter"
    NUMERICAL = "numerical"
    COMPLETION_TOO_LARGE = "completion_too_large"  # no column could hold it


class RowError(Exception):
    """One row cannot be answered; it becomes a Result with `finish_reason = "error"` and the job goes on."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class BatchInferError(Exception):
    """Ends a job. The message is one line: what is wrong, where (file, field), and what to do."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(BatchInferError):
    """The options, or the files they name, cannot make a job; nothing was started."""

    exit_code = ExitCode.USAGE


def first_line(error: BaseException) -> str:
    """An exception's message cut to one line without the final full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
