"""`emberkv why`: why a request did not hit, or what a prompt would get now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emberkv.app.cli.options import DIRECTORY, ManyOptions, as_json, console, print_json
from emberkv.errors import UsageError

if TYPE_CHECKING:
    from emberkv.app.elsewhere import Elsewhere
    from emberkv.live.control.messages import Explanation, WhyPrompt, WhyRequest

_HELP = """Explain where the chunks of a prompt are, or were, and why no more of them were used.

REQUEST is the id of a request of late: the engine's, the client's, or a part of it. Instead, a
prompt may be given, as text, as a chat or as token ids. It is a dry run: the server makes the
tokens and looks where they are; nothing is computed, stored or moved. What the device cache
holds, which the engine uses first, a dry run does not know.

\b
    emberkv why cmpl-4f1b
    emberkv why --prompt-file question.txt --server http://127.0.0.1:8000
    emberkv why --messages request.json --server http://127.0.0.1:8000
"""
_SOURCES = ("request", "prompt", "prompt_file", "messages", "token_ids")


@click.command("why", cls=ManyOptions, help=_HELP, short_help="Tell why a request did not hit.")
@click.argument("request", required=False)
@click.option("--prompt", metavar="TEXT", help="A completion's prompt.")
@click.option("--prompt-file", type=DIRECTORY, metavar="FILE", help="A file with the prompt.")
@click.option(
    "--messages",
    type=DIRECTORY,
    metavar="FILE",
    help="A file with a chat request's JSON body, or its list of messages.",
)
@click.option(
    "--token-ids", type=DIRECTORY, metavar="FILE", help="A file with a JSON list of token ids."
)
@click.option("--server", metavar="URL", help="The server's address, which makes the tokens.")
@click.option("--model", metavar="NAME", help="The model's name there, if it serves several.")
@click.option("--cache-salt", metavar="TEXT", help="The cache salt that the request would have.")
@click.option("--no-special-tokens", is_flag=True, help="A prompt without the BOS token.")
@click.option("-i", "--instance", metavar="NAME", help="The server, if several run.")
@click.option("--history", is_flag=True, help="Also tell all that happened to the chunks.")
@as_json
def command(given: Mapping[str, Any]) -> int:
    """Explain; the help text is `_HELP`."""
    from emberkv.app import elsewhere, servers
    from emberkv.live.control.client import ControlClient
    from emberkv.live.control.messages import Explanation

    named = [source for source in _SOURCES if given[source] is not None]
    if len(named) != 1:
        raise UsageError("say what to explain: a request's id, or one prompt; see emberkv why -h")
    name = servers.chosen(given["instance"])
    question = _question(given)
    with ControlClient(name) as client:
        explanation = client.ask(question, Explanation)
    found = elsewhere.find(explanation)
    if given["as_json"]:
        print_json(_facts(explanation, found))
    else:
        _show(explanation, found, history=given["history"])
    return 0


def _question(given: Mapping[str, Any]) -> WhyRequest | WhyPrompt:
    from emberkv.app import prompts
    from emberkv.live.control.messages import WhyPrompt, WhyRequest

    if given["request"] is not None:
        if given["cache_salt"] is not None:
            raise UsageError("--cache-salt goes with a prompt")
        return WhyRequest(given["request"])
    if given["token_ids"] is not None:
        return WhyPrompt(prompts.token_ids_in(given["token_ids"]), given["cache_salt"])
    if given["server"] is None:
        raise UsageError("--server is missing: the server's address, which makes the tokens")
    server = prompts.TokenServer(given["server"], given["model"])
    salt = given["cache_salt"]
    if given["messages"] is not None:
        chat = prompts.chat_in(Path(given["messages"]))
        return WhyPrompt(server.tokens_of_chat(chat), salt or chat.get("cache_salt"))
    text = given["prompt"]
    if text is None:
        text = prompts.text_in(given["prompt_file"])
    special_tokens = not given["no_special_tokens"]
    return WhyPrompt(server.tokens_of_text(text, special_tokens=special_tokens), salt)


def _facts(explanation: Explanation, found: list[Elsewhere]) -> dict[str, Any]:
    """The explanation for programs, with the sentences that people get."""
    import msgspec

    from emberkv.app import stories

    facts: dict[str, Any] = msgspec.to_builtins(explanation)
    for stretch, told in zip(explanation.stretches, facts["stretches"], strict=True):
        told["keys"] = [key.hex() for key in stretch.keys]
        told["why"] = stories.why(explanation, stretch, found)
        told["history"] = stories.history(stretch)
    facts["summary"] = stories.summary(explanation, found)
    facts["elsewhere"] = [
        {
            "namespace": other.namespace,
            "chunks": len(other.chunks),
            "fields": {name: {"there": there, "here": here} for name, there, here in other.fields},
        }
        for other in found
    ]
    return facts


def _show(explanation: Explanation, found: list[Elsewhere], *, history: bool) -> None:
    from rich.table import Table

    from emberkv.app import stories

    out = console()
    out.print(stories.summary(explanation, found), markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("chunks", "tokens", "where"):
        table.add_column(title, no_wrap=True)
    table.add_column("why", overflow="fold")
    for line in stories.lines(explanation, found):
        table.add_row(*line)
    if table.row_count:
        out.print()
        out.print(table, markup=False)
    if not explanation.all_known:
        out.print("\nOnly chunks that were looked up are known: use EmberConnector for all.")
    if history:
        for stretch in explanation.stretches:
            told = stories.history(stretch)
            if told:
                out.print(f"\nchunk {stretch.first}:", markup=False)
                for event in told:
                    out.print(f"  {event}", markup=False)
