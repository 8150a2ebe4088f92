"""The command `retrograd`: a demo, and check, measure, plan and bench for a model given as `package.module:factory`.

A command is one `Command` in `COMMANDS`: what it is called, its arguments, and a function that returns an `Outcome`.
The exit status is 0 if all is well, 1 if a problem was found, 2, with one sentence on stderr, for a bad call, and 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import retrograd as rg

from .bench import Bench, bench
from .demo import Settings, demo
from .measure import measure, parse_bytes
from .plan import plan
from .screen import Screen


class UsageError(Exception):
    """A call that cannot be right, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command has to say: to a person, to a machine (`--json`), and to the shell."""

    text: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    status: int = 0


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: `arguments` adds its options to a parser, `run` does it."""

    name: str
    summary: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Outcome]


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point: run a command and return the exit status.

    >>> main(["measure", "no.such.module:factory", "--input", "2,8"])
    2
    """
    try:
        parsed = parser().parse_args(arguments)
        try:
            outcome = parsed.command.run(parsed)
        except UsageError as error:
            if getattr(parsed, "traceback", False):
                traceback.print_exc()
            print(f"retrograd {parsed.command.name}: {error}", file=sys.stderr)
            return 2
        if getattr(parsed, "json", False):
            print(json.dumps(_numbers(outcome.data), indent=2, allow_nan=False))
        elif outcome.text:
            print(outcome.text)
        sys.stdout.flush()
        return outcome.status
    except KeyboardInterrupt:
        print("retrograd: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as `| head` does: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _numbers(data: Any) -> Any:
    """The same with what JSON has no number for (infinity, NaN) as words."""
    if isinstance(data, dict):
        return {key: _numbers(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_numbers(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


class _Parser(argparse.ArgumentParser):
    """Errors in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = _Parser(prog="retrograd", description="Reversible networks for PyTorch.")
    top.add_argument("--version", action="version", version=f"retrograd {rg.__version__}")
    commands = top.add_subparsers(title="commands", metavar="command", required=True)
    for command in COMMANDS.values():
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog="example:\n  " + command.example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(sub)
        sub.set_defaults(command=command)
    return top


# The arguments that commands on a model share.


def _model_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="package.module:factory", help="what to import and call: it returns the module")
    sub.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE]",
        help="an input, such as 2,128,64 or 2,128:int64, or a keyword, mask=2,128:bool; once for each",
    )
    sub.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    sub.add_argument("--autocast", choices=sorted(_AUTOCAST), help="the dtype of a forward under autocast")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--traceback", action="store_true", help="show where an error came from")


def _policy_argument(sub: argparse.ArgumentParser, words: str, **options: Any) -> None:
    names = "keep, reverse, reverse:16 (anchor_every), offload or auto:8GiB"
    sub.add_argument("--policy", metavar="POLICY", help=f"{words}: {names}", **options)


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _factory(args: argparse.Namespace) -> Callable[[], nn.Module]:
    """What `package.module:factory` names, as a function that returns a module or raises a UsageError."""
    module_name, _, attribute = args.model.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{args.model!r} must be written package.module:factory")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # models live beside the shell, and `python -m retrograd` sees them too
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"cannot import {module_name!r}: {_sentence(error)}") from error
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise UsageError(f"{module_name!r} has no {attribute!r}") from error

    def build() -> nn.Module:
        try:
            model = found if isinstance(found, nn.Module) else found()
        except Exception as error:
            raise UsageError(f"{args.model} failed: {_sentence(error)}") from error
        if not isinstance(model, nn.Module):
            raise UsageError(f"{args.model} returned no module, but {type(model).__name__}")
        return model

    return build


def _inputs(args: argparse.Namespace, device: torch.device | str) -> tuple[list[Tensor], dict[str, Any]]:
    """The inputs and keywords that `--input` describes: normal floats, small integers, on the device."""
    inputs: list[Tensor] = []
    kwargs: dict[str, Any] = {}
    for text in args.input:
        keyword, _, described = text.rpartition("=")
        sizes, _, name = described.partition(":")
        dtype = getattr(torch, name or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"--input {text}: torch has no dtype {name!r}")
        try:
            shape = [int(size) for size in sizes.split(",")]
        except ValueError:
            shape = [-1]
        if min(shape) < 0:
            raise UsageError(f"--input {text}: a shape is written like 2,128,64")
        floating = dtype.is_floating_point or dtype.is_complex
        try:
            if device == "meta":
                made = torch.empty(shape, dtype=dtype, device="meta")
            elif floating:
                made = torch.randn(shape, device=device).to(dtype)
            else:
                made = torch.randint(0, 2, shape, device=device).to(dtype)
        except Exception as error:
            raise UsageError(f"--input {text}: {_sentence(error)}") from error
        if keyword:
            kwargs[keyword] = made
        else:
            inputs.append(made)
    if not inputs and not kwargs:
        raise UsageError("at least one --input is needed, such as --input 2,128,64")
    return inputs, kwargs


def _device(args: argparse.Namespace) -> torch.device:
    try:
        return torch.device(args.device)
    except RuntimeError as error:
        raise UsageError(f"--device {args.device}: {_sentence(error)}") from error


def _on_device(args: argparse.Namespace, policy: str | None) -> tuple[nn.Module, list[Tensor], dict[str, Any]]:
    """The model, with another policy if one is given, and its inputs, on the device."""
    device, model = _device(args), _factory(args)()
    try:
        model.to(device)
    except Exception as error:
        raise UsageError(f"--device {args.device}: {_sentence(error)}") from error
    if policy is not None:
        reversibles = [module for module in model.modules() if isinstance(module, rg.Reversible)]
        if not reversibles:
            raise UsageError(f"--policy {policy}: there is no Reversible in the model")
        for module in reversibles:
            module.policy = _policy(policy)
    return (model, *_inputs(args, device))


def _policy(text: str) -> rg.Policy:
    name, _, option = text.partition(":")
    try:
        if name == "reverse":
            return rg.Reverse(anchor_every=int(option) if option else None)
        if name == "auto" and option:
            return rg.Auto(budget=_budget(option))
        if name in ("keep", "offload") and not option:
            return rg.Keep() if name == "keep" else rg.Offload()
    except ValueError as error:
        raise UsageError(f"--policy {text}: {error}") from error
    raise UsageError(f"--policy {text}: policies are keep, reverse, reverse:16, offload and auto:8GiB")


def _attempt(args: argparse.Namespace, function: Callable[[], Any]) -> Any:
    """Run the model; if it fails, say on what."""
    try:
        return function()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{args.model} fails on {' '.join(args.input)}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# The commands.


def _demo_arguments(sub: argparse.ArgumentParser) -> None:
    defaults = Settings()
    for name, words in (
        ("depth", "blocks of the model"),
        ("width", "channels of the model"),
        ("length", "bytes of a sequence"),
        ("batch", "sequences of a step"),
        ("steps", "steps of each of the three"),
    ):
        sub.add_argument(
            f"--{name}", type=int, default=getattr(defaults, name), metavar="N", help=f"{words} (default: %(default)s)"
        )
    sub.add_argument(
        "--seconds",
        type=float,
        default=defaults.seconds,
        metavar="S",
        help="how long the reversed model trains on; 0 for not at all (default: %(default)g)",
    )
    sub.add_argument("--data", type=Path, metavar="PATH", help="a file to learn (default: Python's standard library)")
    sub.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    sub.add_argument(
        "--plot",
        type=Path,
        default=defaults.plot,
        metavar="PATH",
        help="where to draw memory and depth (%(default)s)",
    )
    sub.add_argument("--json", action="store_true", help="print JSON at the end, and nothing before")


def _demo(args: argparse.Namespace) -> Outcome:
    given: dict[str, Any] = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
    given["device"] = _device(args)
    try:
        found = demo(Settings(**given), Screen(silent=args.json))
    except ValueError as error:
        raise UsageError(str(error)) from error
    settings = {name: str(value) if isinstance(value, (Path, torch.device)) else value for name, value in given.items()}
    return Outcome("", {"settings": settings} | found.as_dict(), found.status)


def _check(args: argparse.Namespace) -> Outcome:
    from .check import check

    model, inputs, kwargs = _on_device(args, policy=None)
    context: AbstractContextManager[Any] = nullcontext()
    if args.autocast is not None:
        context = torch.autocast(torch.device(args.device).type, _AUTOCAST[args.autocast])
    with context:
        report = _attempt(args, lambda: check(model, *inputs, **kwargs))
    return Outcome(str(report), {"ok": report.ok, **dataclasses.asdict(report)}, 0 if report.ok else 1)


def _measure(args: argparse.Namespace) -> Outcome:
    model, inputs, kwargs = _on_device(args, args.policy)
    found = _attempt(args, lambda: measure(model, *inputs, autocast=_AUTOCAST.get(args.autocast), **kwargs))
    if args.plot is not None:
        try:
            found.plot(args.plot)
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(f"--plot {args.plot}: {error}") from error
    return Outcome(str(found), found.as_dict())


def _measure_arguments(sub: argparse.ArgumentParser) -> None:
    _model_arguments(sub)
    _policy_argument(sub, "in place of the model's own")
    sub.add_argument("--plot", metavar="PATH", help="draw the timeline of live bytes into a PNG, PDF or SVG")


def _plan(args: argparse.Namespace) -> Outcome:
    device, build = _device(args), _factory(args)
    inputs, kwargs = _inputs(args, "meta")
    budgets = [_budget(text) for text in args.budget]
    card = _size("--card", args.card) if args.card else None
    if args.optimizer_states < 0:
        raise UsageError(f"--optimizer-states must be 0 or more, not {args.optimizer_states}")
    if card is None and any(isinstance(budget, float) for budget in budgets):
        raise UsageError("--budget with a fraction needs --card, such as --card 80GiB")
    also = [_policy(text) for text in args.policy]
    options: dict[str, Any] = {"device": device, "autocast": _AUTOCAST.get(args.autocast)}
    options |= {"budgets": budgets, "card": card, "optimizer_states": args.optimizer_states, "also": also}
    found = _attempt(args, lambda: plan(build, *inputs, **options, **kwargs))
    fits = card is None or any(row.fits for row in found.rows)
    return Outcome(str(found), dataclasses.asdict(found), 0 if fits else 1)


def _plan_arguments(sub: argparse.ArgumentParser) -> None:
    _model_arguments(sub)
    _policy_argument(sub, "a row for this policy too, repeatable", action="append", default=[])
    sub.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="SIZE",
        help="a row for Auto(SIZE), repeatable; 0.5 is half the card",
    )
    sub.add_argument("--card", metavar="SIZE", help="the memory of the card; exit status 1 if nothing fits")
    sub.add_argument(
        "--optimizer-states", type=int, default=0, metavar="N", help="tensors per weight in the optimizer: 2 for Adam"
    )


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _budget(text: str) -> str | float:
    """A size, or a fraction of the card."""
    try:
        budget: str | float = float(text) if text.startswith("0.") else text
        rg.Auto(budget)
        return budget
    except ValueError as error:
        raise UsageError(f"--budget {text}: a size such as 8GiB, or a fraction of the card such as 0.5") from error


def _bench_arguments(sub: argparse.ArgumentParser) -> None:
    _model_arguments(sub)
    _policy_argument(sub, "a row for this policy too, repeatable", action="append", default=[])
    sub.add_argument("--rounds", type=int, default=5, metavar="N", help="steps that are timed (default: %(default)s)")


def _bench(args: argparse.Namespace) -> Outcome:
    if args.rounds < 1:
        raise UsageError(f"--rounds must be 1 or more, not {args.rounds}")
    policies, screen = {text: _policy(text) for text in args.policy}, Screen(silent=args.json)
    model, inputs, kwargs = _on_device(args, policy=None)
    options: dict[str, Any] = {"rounds": args.rounds, "autocast": _AUTOCAST.get(args.autocast), "screen": screen}
    found: Bench = _attempt(args, lambda: bench(model, inputs, kwargs, policies, **options))
    if found.rows:
        screen.say(f"One training step of {args.model} on {found.device}, the median of {args.rounds}:")
        screen.table(found.table())
    for row in found.rows:
        if row.failed is not None:
            screen.say(f"{row.policy}: {row.failed}")
    failed = any(row.failed for row in found.rows)
    return Outcome("", found.as_dict(), 130 if found.stopped else 1 if failed else 0)


def _completion_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("shell", choices=["bash", "zsh", "fish"])


def _completion(args: argparse.Namespace) -> Outcome:
    """Words to complete, read off the parser: the commands, the options of each, and what an option takes."""
    top = parser()
    group = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return Outcome("\n".join((_fish if args.shell == "fish" else _bash)(group.choices, args.shell)))


def _bash(commands: dict[str, argparse.ArgumentParser], shell: str) -> list[str]:
    """For bash, and for zsh through its emulation of bash's completion."""
    own = {name: [*_long(sub), *_words(sub)] for name, sub in commands.items()}
    taking = {name: action for sub in commands.values() for name, action in _long(sub).items() if action.nargs != 0}
    loaded = [
        "(( $+functions[compdef] )) || { autoload -U compinit && compinit; }",
        "autoload -U +X bashcompinit && bashcompinit",
    ]
    return [
        *(loaded if shell == "zsh" else []),
        "_retrograd() {",
        "  local words",
        '  case "${COMP_WORDS[1]}" in',
        *(f"    {name}) words='{' '.join(words)}' ;;" for name, words in own.items()),
        "  esac",
        '  case "${COMP_WORDS[COMP_CWORD-1]}" in',
        *(f"    {option}) words='{' '.join(action.choices or [])}' ;;" for option, action in taking.items()),
        "  esac",
        f"  [ \"$COMP_CWORD\" -eq 1 ] && words='{' '.join(commands)}'",
        '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
        "}",
        "complete -o default -F _retrograd retrograd",
    ]


def _fish(commands: dict[str, argparse.ArgumentParser], shell: str) -> list[str]:
    def quoted(text: str) -> str:
        return "'" + text.replace("'", "\\'") + "'"

    lines = []
    for name, sub in commands.items():
        first = f"complete -c retrograd -n __fish_use_subcommand -fa {name}"
        lines.append(f"{first} -d {quoted(COMMANDS[name].summary)}")
        here = f"complete -c retrograd -n '__fish_seen_subcommand_from {name}'"
        for option, action in _long(sub).items():
            takes = f" -xa '{' '.join(action.choices)}'" if action.choices else " -r" if action.nargs != 0 else ""
            described = quoted(sub._get_formatter()._expand_help(action))
            lines.append(f"{here} -l {option[2:]}{takes} -d {described}")
        if words := _words(sub):
            lines.append(f"{here} -fa '{' '.join(words)}'")
    return lines


def _long(sub: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a command, by their long names."""
    return {name: action for action in sub._actions for name in action.option_strings if name.startswith("--")}


def _words(sub: argparse.ArgumentParser) -> list[str]:
    """What a command takes besides options, if there is a choice."""
    return [word for action in sub._actions if not action.option_strings for word in action.choices or []]


COMMANDS = {
    command.name: command
    for command in [
        Command(
            "demo",
            "train a language model kept, checkpointed and reversed, and show what it saves",
            "retrograd demo --depth 64 --device cuda --data war-and-peace.txt",
            _demo_arguments,
            _demo,
        ),
        Command(
            "check",
            "compare the gradients of a model with those of kept activations",
            "retrograd check my.models:make --input 2,128,64",
            _model_arguments,
            _check,
        ),
        Command(
            "measure",
            "measure the memory and the time of one training step",
            "retrograd measure my.models:make --input 2,128,64 --policy keep --plot step.png",
            _measure_arguments,
            _measure,
        ),
        Command(
            "plan",
            "predict memory and cost for each policy, without allocating anything",
            "retrograd plan my.models:make --input 1,131072,1024 --device cuda --autocast bf16 --card 80GiB",
            _plan_arguments,
            _plan,
        ),
        Command(
            "bench",
            "time and memory of a model's own step under each policy, side by side",
            "retrograd bench my.models:make --input 2,128,64 --policy reverse:16 --policy auto:1GiB",
            _bench_arguments,
            _bench,
        ),
        Command(
            "completion",
            "print a script that completes the commands in a shell",
            'eval "$(retrograd completion bash)"',
            _completion_arguments,
            _completion,
        ),
    ]
}
