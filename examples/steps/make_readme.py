"""Write the diffs between the scripts, and the numbers of mistakes.py, into README.md and README.zh-CN.md.

python examples/steps/make_readme.py                       the diffs
python examples/steps/make_readme.py --measure             the numbers as well, in a few minutes
python examples/steps/make_readme.py --measure NAME [...]  the numbers of these mistakes
"""

import difflib
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
READMES = {"english": HERE / "README.md", "chinese": HERE / "README.zh-CN.md"}


def scripts() -> list[Path]:
    return sorted(HERE.glob("[1-6]_*.py"))


def diff(old: Path, new: Path) -> str:
    """The unified diff, without the names of the files."""
    texts = [path.read_text(encoding="utf-8").splitlines() for path in (old, new)]
    lines = list(difflib.unified_diff(*texts, n=2, lineterm=""))[2:]
    return "\n".join(map(str.rstrip, lines))  # an empty line of context would be a space


def diffs() -> list[str]:
    return [diff(old, new) for old, new in zip(scripts(), scripts()[1:], strict=False)]


def with_diffs(text: str) -> str:
    """A README with the diffs of the scripts as they are now. The blocks are in their order."""
    each = iter(diffs())
    text, count = re.subn(r"```diff\n.*?```", lambda _: f"```diff\n{next(each)}\n```", text, flags=re.DOTALL)
    assert count == len(scripts()) - 1, count
    return text


def with_numbers(text: str, language: str, measured: dict[str, dict[str, Any]]) -> str:
    """A README with these numbers of mistakes.py. Each line of it occurs once."""
    from mistakes import MISTAKES

    for name, numbers in measured.items():
        words = getattr(MISTAKES[name], language)
        text, count = MISTAKES[name].cell(name, words).subn(f"| `{name}`: {words.format(**numbers)} |", text)
        assert count == 1, f"{name}: {count} times in the {language} README"
    return text


def main() -> None:
    measured = {}
    if "--measure" in sys.argv[1:]:
        from mistakes import MISTAKES

        for name in sys.argv[2:] or MISTAKES:
            measured[name] = MISTAKES[name].measure()
            print(name, measured[name], *MISTAKES[name].outside(measured[name]), flush=True)
    for language, path in READMES.items():
        text = with_numbers(path.read_text(encoding="utf-8"), language, measured)
        path.write_text(with_diffs(text), encoding="utf-8")


if __name__ == "__main__":
    main()
