"""Usage: the commands by name, and how they are written."""

from collections.abc import Iterable

USAGE = """usage: megabatch init [FILE] [--model NAME] [--data PATH] [--hardware "8 gpus"]   write a recipe
       megabatch train RECIPE [--section.key=value ...]       train; a run's folder as RECIPE goes on with it
       torchrun --nproc-per-node N -m megabatch train RECIPE [--section.key=value ...]
       megabatch plan RECIPE [--world N] [--device NAME] [--memory 80GiB] [--bandwidth 235GB/s] [--length TOKENS]
                             [--json] [--chart FILE] [--section.key=value ...]      what fits and what it costs
       megabatch verify RECIPE [--section.key=value ...]      cut against uncut, on its model, loss and data
       megabatch export RUN --to DIR [--step N|best|latest] [--merged]      write a run's model as a Hugging Face
                             folder; of model.lora its adapters, or the whole model with them in it (--merged)
       megabatch report RUN [--to FILE.html]   a page to look at; without --to it is RUN/report.html
       megabatch report --compare RUN RUN      two runs, update by update, by what run.manifest has written;
                        [--to FILE.html]       and a page that lays one over the other
       megabatch watch RUN [--port N]          the page while the run goes on, for this machine's browsers alone
       megabatch doctor [--folder DIR]         what is here, and an update that is proved; under torchrun, all ranks
       megabatch completion bash|zsh|fish      a script by which a shell completes commands, recipes and keys

RECIPE is a TOML file; the command line overrides any key of it. `megabatch train --help` explains the keys,
`megabatch train RECIPE --help` shows them with the recipe's values."""

COMMANDS = ("init", "train", "plan", "verify", "export", "report", "watch", "doctor", "completion")
WITH_RECIPE = ("train", "plan", "verify")
ALONE = ("init", "verify", "export", "report", "watch", "completion")  # in one process
SHELLS = ("bash", "zsh", "fish")


def parted(arguments: Iterable[str]) -> list[str]:
    """The arguments with ``--name=value`` in two; any other word stays whole, such as a folder with an = in it."""
    return [part for each in arguments for part in (each.split("=", 1) if each.startswith("--") else [each])]
