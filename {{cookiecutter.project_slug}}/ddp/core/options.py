"""Options as dataclass fields: how they are read from the command line or from a file, and how a value is checked."""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from ddp.core.errors import UsageError
from ddp.core.parts import missing_part

HUGE = 10**12  # no option can be larger
HELP_SECTIONS = ("data", "training", "speed", "run", "distributed")  # in the order of --help
METAVARS = {int: "N", float: "X", str: "NAME"}  # what --help prints in place of a value
# Options of earlier versions: the default, and what is in their place.
REMOVED = {"comm_hook": ("none", "now 'Compressed gradients' in docs/recipes.md")}
OF_ONE_PROCESS = ("rank", "world_size", "local_rank", "init_method")  # in config.json, but not those of the next run


def number(kind: type, min: float = -HUGE, max: float = HUGE, *, above: float | None = None) -> Callable[[str], Any]:
    """A reader of numbers from `min`, or of those larger than `above`, to `max`."""
    least, sign = (min, ">=") if above is None else (above, ">")

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= max or value == above:  # nan is in no range
            limit = f" and <= {max:.12g}" if max < HUGE or value > max else ""
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} must be {what} {sign} {least:g}{limit}")
        return value

    return read


def path(text: str) -> str:
    """The path of a file or directory, which need not exist."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path")
    return text


def option(
    default: Any,
    help: str,
    *,
    min: float = -HUGE,
    above: float | None = None,  # a limit that is not itself allowed
    max: float = HUGE,
    choices: Sequence[str] = (),
    metavar: str = "",  # what --help prints in place of a value; "PATH" and "URL" refuse an empty one
    may_change: bool | None = None,  # whether a resumed run may have another value; by default, what per_process is
    per_process: bool = False,  # whether the processes of one run may have different values, such as paths
    section: str = "training",  # of --help
    variable: str = "",  # an environment variable that sets the option as well
    alias: str = "",  # another name of the option, as another program calls it
) -> Any:
    """A dataclass field that is a command-line option. It is annotated as bool, int, float or str, or that | None."""
    rules = dict(locals())  # the arguments
    rules["may_change"] = per_process if may_change is None else may_change
    if isinstance(rules.pop("default"), list | dict | set):  # add_options refuses it, in one line
        return dataclasses.field(default_factory=lambda: default, metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


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
        # --batch_size=8 is --batch-size=8; the value keeps its underscores.
        words = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in words]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^(--[\w-]+)/--[\w-]+", r"\1", message.removeprefix("argument "))  # without the alias
        if unknown := re.match("unrecognized arguments: ([^ =]+)", message):
            if (name := unknown[1][2:].replace("-", "_")) in REMOVED:
                raise UsageError(f"{unknown[1]} is {REMOVED[name][1]}")
            if missing := missing_part(name):
                raise UsageError(f"{unknown[1]}: {missing}")
            known = getattr(self, "_option_string_actions", ())  # a private name
            near = get_close_matches(unknown[1], known, n=1, cutoff=0.75)
            message += "".join(f" (did you mean {name}?)" for name in near) + self.unknown_hint
        raise UsageError(f"{message}; see --help")

    def add_options(self, options_class: Any) -> None:
        """Add every option of a dataclass: in each section of --help, its own before those that it inherits."""
        hints, classes = get_type_hints(options_class), [*enumerate(options_class.__mro__)]
        order = {name: depth for depth, each in classes[::-1] for name in get_annotations(each)}
        for item in sorted(dataclasses.fields(options_class), key=lambda item: order[item.name]):
            rules, hint = item.metadata, hints[item.name]
            kind, *others = {*(get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint])} - {NoneType}
            if not rules:
                raise UsageError(f"{item.name} in config.py is no option: write it as training_option(default, help)")
            if others or (kind is not bool and kind not in METAVARS):
                remedy = "annotate it as bool, int, float or str, or one of them | None; a list may be a str to split"
                raise UsageError(f"{item.name} in config.py is no option that a command line has: {remedy}")
            if item.default is True:  # a flag only sets
                raise UsageError(f"{item.name} in config.py is True by default: name the opposite, which is False")
            notes = "" if kind is bool or item.default in (None, "") else f" (default: {item.default})"
            notes += f" [{rules['variable']}]" if rules["variable"] else ""
            settings: dict[str, Any] = {"help": (rules["help"] + notes).replace("%", "%%")}
            if kind is bool:
                settings["action"] = "store_true"
            elif rules["choices"]:
                settings["choices"] = rules["choices"]
            else:
                settings["metavar"] = rules["metavar"] or METAVARS[kind]
                text = path if rules["metavar"] in ("PATH", "URL") else str
                in_range = number(kind, rules["min"], rules["max"], above=rules["above"])
                settings["type"] = text if kind is str else in_range
            names = filter(None, [flag_of(item.name), rules["alias"]])
            value = os.environ.get(rules["variable"]) or argparse.SUPPRESS  # read like an argument, which wins
            section = rules["section"]
            if section not in self.sections:
                self.sections[section] = self.add_argument_group(section)
            self.sections[section].add_argument(*names, default=value, **settings)


def file_arguments(path: str) -> list[str]:
    """The options of a TOML or JSON file, or of a run in its config.json, as arguments. Raises UsageError."""
    kind = "TOML" if path.endswith(".toml") else "JSON (a TOML file ends with .toml)"
    try:
        loads: Any = json.loads
        if kind == "TOML":
            from tomllib import loads
        options = loads(Path(path).read_text())
    except ImportError as error:
        raise UsageError("TOML needs Python 3.11 or newer; write it as JSON") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read as {kind}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(options, dict):
        raise UsageError("needs names and values of options")
    if isinstance(of_run := options.get("options"), dict):  # config.json of a run
        options = {name: value for name, value in of_run.items() if name not in OF_ONE_PROCESS}
    options = {name: value for name, value in options.items() if name not in REMOVED or value != REMOVED[name][0]}
    words = []
    for name, value in options.items():
        if name == "config":
            raise UsageError("a file cannot name another one")
        if not isinstance(value, str | int | float | None):
            raise UsageError(f"{name} must be one value, such as lr = 0.1")
        if isinstance(value, bool):
            words += [flag_of(name)] * value
        elif value is not None:
            words.append(f"{flag_of(name)}={value}")
    return words
