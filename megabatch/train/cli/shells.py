"""Shells: scripts by which a shell completes megabatch's commands, recipes, keys and their values.

The words are written into the script, so that a tab waits for no Python. After an update of megabatch the line in a
shell's profile, `eval "$(megabatch completion bash)"`, writes them anew.
"""

from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from megabatch.errors import MegabatchError
from megabatch.train.cli.init.hardware import DEVICES
from megabatch.train.cli.usage import COMMANDS, SHELLS, WITH_RECIPE
from megabatch.train.config.keys import fields_of, is_named_sources, is_options, known_keys, sections

OPTIONS = {  # of commands that read no key
    "init": ("--model=", "--data=", "--hardware="),
    "plan": ("--world=", "--device=", "--memory=", "--bandwidth=", "--length=", "--json", "--chart="),
    "export": ("--to=", "--step=", "--merged"),
    "report": ("--compare", "--to="),
    "watch": ("--port=",),
    "doctor": ("--folder=",),
}
VALUES = {
    "--device=": (*DEVICES, "cpu"),
    "--step=": ("best", "latest"),
    "--hardware=": ("cpu",),
    "--model=": ("small",),
}
FILES = ("--data=", "--chart=", "--to=", "--folder=")  # as are keys named so
FILE_KEYS = ("path", "folder", "cache", "name", "tokenizer")

BASH = """\
_megabatch() {{
    local word=${{COMP_LINE:0:COMP_POINT}}
    word=${{word##* }}
    local shown=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words='' key=${{word%%=*}}=
    [[ $shown == "=" ]] && shown=
    compopt +o nospace 2>/dev/null
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands}"
    elif [[ $word == --*=* ]]; then
        case $key in
{values}
            {files}) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "${{word#*=}}"); return ;;
        esac
        shown=${{word#*=}}
    elif [[ $word == -* ]]; then
        case $verb in
{options}
        esac
        compopt -o nospace 2>/dev/null
    elif [[ $verb == completion ]]; then
        words="{shells}"
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(
            compgen -d -- "$word"
            [[ "{recipes}" == *" $verb "* ]] && compgen -f -X '!*.toml' -- "$word"
        )
        return
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words --help" -- "$shown")
}}
complete -F _megabatch megabatch
"""

ZSH = """\
#compdef megabatch
_megabatch() {{
    local verb=${{words[2]}} word=${{PREFIX}} key=${{PREFIX%%=*}}=
    if (( CURRENT == 2 )); then
        compadd -- {commands} --help
    elif [[ $word == --*=* ]]; then
        compset -P '*='
        case $key in
{values}
            {files}) _files ;;
        esac
    elif [[ $word == -* ]]; then
        local -a found
        case $verb in
{options}
        esac
        compadd -S '' -- $found
        compadd -- --help
    elif [[ $verb == completion ]]; then
        compadd -- {shells}
    elif [[ "{recipes}" == *" $verb "* ]]; then
        _files -g '*.toml(-.)' || _files -/
    else
        _files
    fi
}}
if [[ ${{funcstack[1]}} == _megabatch ]]; then _megabatch "$@"; else compdef _megabatch megabatch; fi
"""

FISH = """\
function __megabatch_words
    set -l line (commandline -opc)
    set -l word (commandline -ct)
    if test (count $line) -eq 1
        string split ' ' -- '{commands} --help'
        return
    end
    if string match -q -- '--*=*' $word
        set -l key (string split -m 1 = -- $word)[1]=
        switch $key
{values}
            case {files}
                __fish_complete_path (string split -m 1 = -- $word)[2] | string replace -r '^' -- $key
        end
        return
    end
    if not string match -q -- '-*' $word; and test "$line[2]" != completion
        __fish_complete_suffix .toml
        return
    end
    switch $line[2]
        case completion
            printf '%s\n' {shells} --help
{options}
    end
end
complete -c megabatch -f -k -a '(__megabatch_words)'
"""


class Shell(NamedTuple):
    """A script, and how the shell writes what is filled into it."""

    script: str
    value: str  # after an equals sign, one of few
    option: str  # after a command
    between_files: str  # that name options whose value is a file


SHELL_OF = {
    "bash": Shell(BASH, '            {word}) words="{words}" ;;', '            {word}) words="{words}" ;;', "|"),
    "zsh": Shell(ZSH, "            {word}) compadd -- {words} ;;", "            {word}) found=({words}) ;;", "|"),
    "fish": Shell(
        FISH,
        '            case {word}\n                printf "$key%s\\n" {words}',
        "        case {word}\n            printf '%s\\n' {words} --help",
        " ",
    ),
}


def script_for(arguments: list[str]) -> str:
    """The script of the shell that is named. Raises `MegabatchError` where none of them is."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise MegabatchError(
            f"cannot read the arguments {' '.join(arguments)!r}; write: megabatch completion {'|'.join(SHELLS)}"
        )
    shell = SHELL_OF[arguments[0]]
    return shell.script.format(
        commands=" ".join(COMMANDS),
        shells=" ".join(SHELLS),
        recipes=f" {' '.join(WITH_RECIPE)} ",
        values=lines(shell.value, choices()),
        options=lines(shell.option, options()),
        files=shell.between_files.join(file_words()),
    )


def lines(line: str, words_of: Mapping[str, Iterable[str]]) -> str:
    """A line for each word."""
    return "\n".join(line.format(word=word, words=" ".join(words)) for word, words in words_of.items())


def options() -> dict[str, list[str]]:
    """What may stand after each command, an equals sign at its end where a value follows."""
    keys = [f"--{key}." if is_table(kind) else f"--{key}=" for key, kind in known_keys().items()]
    recipes = {name: [*OPTIONS.get(name, ()), *keys] for name in WITH_RECIPE}
    return {name: list(words) for name, words in OPTIONS.items() if name not in recipes} | recipes


def is_table(kind: Any) -> bool:
    """Whether the value is a table, whose own keys are anybody's."""
    return is_options(kind) or is_named_sources(kind)


def choices() -> dict[str, tuple[str, ...]]:
    """Words that name a value of few → these."""
    of_keys = {f"--{key}=": values_of(kind) for key, kind in known_keys().items()}
    return VALUES | {word: values for word, values in of_keys.items() if values}


def values_of(kind: Any) -> tuple[str, ...]:
    """The values of a type that has few, as the command line writes them."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    if kind is bool:
        return "true", "false"
    if get_origin(kind) in (Union, UnionType):
        found = tuple(value for member in get_args(kind) for value in values_of(member))
        return (*found, "none") if found and type(None) in get_args(kind) else found
    if get_origin(kind) is list:
        return values_of(get_args(kind)[0])
    return ()


def file_words() -> list[str]:
    """Words whose value is a file or a folder."""
    keys = [f"--{name}.{key}=" for name, section in sections().items() for key in fields_of(section)]
    named = [word for word in keys if word.removesuffix("=").rpartition(".")[2] in FILE_KEYS]
    return [*FILES, *(word for word in named if word not in ("--optim.name=", "--tracking.name="))]
