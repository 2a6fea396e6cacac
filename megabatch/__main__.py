"""`python -m megabatch`: the same command line as `megabatch`, for `torchrun -m megabatch`."""

import sys

from megabatch.errors import MegabatchError, install_command, require_version

EXTRA = {
    "datasets",
    "pyarrow",
    "pydantic",
    "rich",
    "safetensors",
    "tensorboard",
    "tomli_w",
    "transformers",
    "tyro",
}  # what [train] installs


def main() -> None:
    """Run the command line, or say in one line what is not installed."""
    try:
        from megabatch.train.cli import front

        status = front.run(sys.argv[1:])
        if status is not None:
            sys.exit(status)
        require_version("transformers")
        from megabatch.train.cli import commands
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRA:
            raise
        print(f"megabatch: {name} is not installed; {install_command('train')}", file=sys.stderr)
        sys.exit(2)
    except MegabatchError as error:
        print(f"megabatch: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # while torch is imported, which takes seconds
        print(file=sys.stderr)
        sys.exit(130)
    commands.main()


if __name__ == "__main__":
    main()
