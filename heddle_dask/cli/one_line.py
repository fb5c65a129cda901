"""Errors of the command line: bad input is one line on stderr and exit code 2.

The group handles them itself instead of leaving them to the program that runs it, so that ``heddle …`` and
``dask heddle …`` behave equally. Any other exception is a bug of this package and stays a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from typing import Any

import click

from heddle_dask.core.errors import BadInput, WriteFailed, escaped
from heddle_dask.isolation.output_streams import keep_output_alive

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_TO_RESUME = 75  # EX_TEMPFAIL of sysexits.h: try again later
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class OneLineGroup(click.Group):
    """A group that reports bad input in one line, without a usage block or a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        keep_output_alive()
        with one_line_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn bad input into one line and exit code 2, a full disk into exit code 1, an early Ctrl-C into 130."""
    try:
        yield
    except BadInput as error:
        refuse(str(error))
    except WriteFailed as error:
        refuse(str(error), EXIT_FAILED)
    except click.ClickException as error:
        refuse(_message(error))
    except OSError as error:
        # Only what was given on the command line is as long as that; every other one is a bug or a broken machine.
        if error.errno != errno.ENAMETOOLONG:
            raise
        refuse(f"{str(error.filename)[:60]}… is too long for a file name")
    except (KeyboardInterrupt, click.Abort):
        click.echo("heddle: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)


def refuse(message: str, exit_code: int = EXIT_BAD_INPUT) -> None:
    one_line(message)
    sys.exit(exit_code)


def one_line(message: str) -> None:
    click.echo(f"heddle: {escaped(' '.join(message.split()))}", err=True)


def _message(error: click.ClickException) -> str:
    """Click's message, with the allowed options or commands that click prints in its usage block."""
    message = error.format_message()
    ctx = getattr(error, "ctx", None)
    if ctx is None:
        return message
    if isinstance(error, click.NoSuchOption):
        return f"{message} Allowed: {', '.join(long_options(ctx.command))}."
    if isinstance(ctx.command, click.Group):
        return f"{message} Commands: {', '.join(ctx.command.commands)}."
    return message


def long_options(command: click.Command) -> list[str]:
    """The long options of a command, with the two dashes."""
    options = (name for param in command.params for name in (*param.opts, *param.secondary_opts))
    return [name for name in options if name.startswith("--")] + ["--help"]
