"""Copy an example into a rendered project: python examples/apply.py NAME PROJECT."""

import shutil
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/data.py"))


def apply(name: str, project: Path) -> None:
    """Replace data.py, config.py and, for most, model.py, for a few main.py; add the README as EXAMPLE.md.

    Delete the test of the ToyModel if that is replaced; and, without images, the four files that are about them.
    """
    for file in (EXAMPLES / name).glob("*.py"):
        shutil.copyfile(file, project / file.name)
    shutil.copyfile(EXAMPLES / name / "README.md", project / "EXAMPLE.md")
    if (EXAMPLES / name / "model.py").exists():
        (project / "tests/test_toy_model.py").unlink(missing_ok=True)
    if "from image" not in (project / "data.py").read_text(encoding="utf-8"):
        for file in ("images.py", "image_files.py", "file_list.py", "predict.py"):
            (project / file).unlink(missing_ok=True)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: python examples/apply.py NAME PROJECT, where NAME is one of {', '.join(NAMES)}")
    project = Path(sys.argv[2])
    if not (project / "ddp").is_dir():
        sys.exit(f"{project} is not a project made from this template: it has no ddp/")
    apply(sys.argv[1], project)
    print(f"{sys.argv[1]} is now the task of {project}; {project / 'EXAMPLE.md'} lists the commands")


if __name__ == "__main__":
    main()
