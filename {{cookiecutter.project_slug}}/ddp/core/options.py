"""Options as dataclass fields: how a field becomes a command-line option, and how its value is checked."""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn

from ddp.core.errors import UsageError

HUGE = 10**12  # no option can be larger
HELP_SECTIONS = ("data", "training", "speed", "run", "distributed")  # in the order of --help


def number(kind: type, min: float, *, exclusive: bool = False, max: float = HUGE) -> Callable[[str], Any]:
    """A reader of numbers from `min` (excluded if `exclusive`) to `max`."""
    allowed = f"{'an integer' if kind is int else 'a number'} {'>' if exclusive else '>='} {min:g}"
    allowed += "" if max == HUGE else f" and <= {max:.12g}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not min <= value <= max or (exclusive and value == min):  # nan is in no range
            too_large = math.inf > value > HUGE == max
            raise argparse.ArgumentTypeError(f"{text!r} is too large" if too_large else f"{text!r} must be {allowed}")
        return value

    read.__name__ = "n" if kind is int else "x"  # --help shows it, in capitals, in place of the value
    return read


def directory(text: str) -> str:
    """A path; it need not exist."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not the path of a directory")
    return text


def path(text: str) -> str:
    """The path of a file, or a word for one."""
    return text


def name(text: str) -> str:
    """Any word."""
    return text


def url(text: str) -> str:
    """`tcp://HOST:PORT` or `file:///PATH`."""
    match = re.fullmatch(r"tcp://.+:([0-9]+)|file:///.+", text)
    if match is None or not 0 < int(match[1] or 1) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not tcp://HOST:PORT or file:///PATH")
    return text


non_negative = number(int, 0)
positive = number(int, 1)


def option(
    default: Any,
    help: str,
    *,
    kind: Any = None,  # a function that reads the value from text; by default, it follows from the type of `default`
    choices: Sequence[str] = (),
    may_change_on_resume: bool = False,  # if False, a resumed run with another value is refused as a different run
    per_process: bool = False,  # whether the processes of one run may have different values
    section: str = "training",  # of --help
    variable: str | None = None,  # an environment variable that sets the option too
    alias: str | None = None,  # another name of the option, as another program calls it
) -> Any:
    """A dataclass field that is a command-line option."""
    if kind is None:
        assert default is not None, f"option({help!r}): pass kind=, since no type follows from the default None"
        assert default is not True, f"option({help!r}): name the opposite, with the default False: a flag only sets"
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        kind = number(type(default), -HUGE) if is_number else name
    metadata = {
        "help": help,
        "kind": kind,
        "choices": tuple(choices),
        "section": section,
        "variable": variable,
        "alias": alias,
    }
    metadata |= {"may_change_on_resume": may_change_on_resume, "per_process": per_process}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field_name: str) -> str:
    """`batch_size` -> `--batch-size`."""
    return "--" + field_name.replace("_", "-")


class OptionParser(argparse.ArgumentParser):
    """Raises UsageError with one line, where argparse would print the usage and exit in every process."""

    unknown_hint = ""  # the advice about an option that does not exist

    def __init__(self, **settings: Any) -> None:
        layout = partial(argparse.HelpFormatter, max_help_position=34, width=110)
        super().__init__(**{"formatter_class": layout, "allow_abbrev": False, **settings})
        self.sections: dict[str, Any] = {section: self.add_argument_group(section) for section in HELP_SECTIONS}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([with_hyphens(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^(--[\w-]+)/--[\w-]+", r"\1", message.removeprefix("argument "))  # without the alias
        if message.startswith("unrecognized"):
            first = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
            near = (
                get_close_matches(first, self._option_string_actions, n=1, cutoff=0.75)
                if first.startswith("--")
                else []
            )
            message += f" (did you mean {near[0]}?)" if near else ""
            message += self.unknown_hint
        raise UsageError(f"{message}; see --help")

    def add_options(self, options_class: Any) -> None:
        """Add every option of a dataclass: in each section of --help, its own before those that it inherits."""
        own = options_class.__annotations__
        for item in sorted(dataclasses.fields(options_class), key=lambda item: item.name not in own):
            section, help, kind, choices = (item.metadata[key] for key in ("section", "help", "kind", "choices"))
            if section not in self.sections:
                self.sections[section] = self.add_argument_group(section)
            settings: dict[str, Any] = {"action": "store_true"}
            if item.default is not False:
                help += "" if item.default in (None, "") else f" (default: {item.default})"
                help += f" [{item.metadata['variable']}]" if item.metadata["variable"] else ""
                settings = {"choices": choices} if choices else {"type": kind, "metavar": kind.__name__.upper()}
            settings |= {"help": help.replace("%", "%%"), "default": argparse.SUPPRESS}
            names = [flag_of(item.name), *filter(None, [item.metadata["alias"]])]
            self.sections[section].add_argument(*names, **settings)


def with_hyphens(argument: str) -> str:
    """`--batch_size=8` -> `--batch-size=8`; the value keeps its underscores."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if argument.startswith("--") else argument


def environment_arguments(options_class: Any, environ: Mapping[str, str]) -> list[str]:
    """Arguments for the options that an environment variable sets. Put them before the command line, which wins."""
    variables = {flag_of(item.name): item.metadata["variable"] for item in dataclasses.fields(options_class)}
    return [f"{flag}={environ[variable]}" for flag, variable in variables.items() if environ.get(variable or "")]
