"""Plays the demo: the same questions to vLLM without emberkv and with it, and one table."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from demo.client import Answer, AnswerError, request_body
from demo.documents import CountTokens, Document, make_documents
from demo.screen import Screen
from demo.script import NEXT_QUESTION, VISITS, Conversation, questions_of
from demo.server import ServerError
from demo.sides import DISK_SIZE, KEEP_S, RAM_SIZE, TIER_DIRECTORY, EmberSide, PlainSide
from demo.verdicts import Phase, Turn
from emberkv.errors import UsageError
from emberkv.testing.models import models_dir, prepare_smollm2

Asked = tuple[str, int]
"""A document's name and the turn."""

REQUEST_FILE: Final = "request.json"

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 only if every phase was served from the tier it should."""
    options = _options(arguments)
    screen = Screen()
    for number in INTERRUPTS:
        signal.signal(number, _interrupt)
    parent = options.dir or models_dir().parent / "demo"
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    status = EXIT_INTERRUPTED
    kept: EmberSide | None = None
    try:
        phases, kept = _run(scratch, screen, keep=options.keep)
        status = verdict(phases, screen)
        if options.facts is not None:
            options.facts.write_text(json.dumps([facts_of(phase) for phase in phases]))
        if kept is not None:
            _show_how_to_try(kept, scratch, screen)
    except UsageError as error:
        screen.fail(str(error))
        status = EXIT_USAGE
    except (ServerError, AnswerError) as error:
        screen.fail(str(error))
        status = EXIT_FAILED
    except KeyboardInterrupt:
        if kept is not None:
            kept.close()
            kept = None
        status = EXIT_INTERRUPTED
    finally:
        # First of all: nobody may be left to read what is said.
        if kept is None:
            _clean_up(scratch, keep_logs=status == EXIT_FAILED)
    if status == EXIT_INTERRUPTED:
        screen.fail("interrupted; every process of the demo has been ended")
    if status == EXIT_FAILED and kept is None:
        screen.say(f"logs are in {scratch}")
    return status


def _clean_up(scratch: Path, *, keep_logs: bool) -> None:
    """Remove what the run left on disk; logs stay if there is something to find out."""
    shutil.rmtree(scratch / TIER_DIRECTORY if keep_logs else scratch, ignore_errors=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the server with emberkv up")
    parser.add_argument(
        "--dir",
        type=Path,
        help="a directory on a real disk for logs and the disk tier (default: in the user's cache)",
    )
    parser.add_argument("--facts", type=Path, help="a file for what was measured, as JSON")
    return parser.parse_args(arguments)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End in order; an impatient second signal must not leave processes behind."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(scratch: Path, screen: Screen, *, keep: bool) -> tuple[list[Phase], EmberSide | None]:
    """Both sides, one after the other; returns the phases and what was left up, if asked to."""
    with screen.working("preparing SmolLM2-135M and three documents"):
        model = prepare_smollm2()
        documents = make_documents(_counter(model))
    screen.say(
        f"SmolLM2-135M, float32, on this machine's CPU. Three documents of about 2,000 tokens; the "
        f"device cache holds one. RAM tier {RAM_SIZE}, disk tier {DISK_SIZE}."
    )
    plain = PlainSide(model, scratch, screen)
    try:
        screen.heading("1/2  without emberkv: what a document costs each time it comes back")
        answers = _play_plain(plain, documents, screen)
    finally:
        plain.close()
    ember = EmberSide(model, scratch, screen, f"demo-{os.getpid()}")
    finished = False
    try:
        screen.heading("2/2  with emberkv: the same questions")
        phases = _play_ember(ember, documents, answers, screen)
        finished = True
    finally:
        if not (keep and finished):
            ember.close()
    if not keep:
        return phases, None
    _write_request(scratch, documents[0])
    return phases, ember


def _counter(model: Path) -> CountTokens:
    """Counts as the model's own tokenizer does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: len(tokenizer.encode(text))


def _play_plain(
    side: PlainSide, documents: Sequence[Document], screen: Screen
) -> dict[Asked, Answer]:
    """Ask everything; the answers become part of the conversations, on both sides."""
    conversations = {document.name: Conversation(document) for document in documents}
    answers: dict[Asked, Answer] = {}
    for number, visit in enumerate(VISITS):
        screen.heading(visit.name)
        side.begin(visit.before, Phase(visit.name, visit.source))
        for question in questions_of(number, documents):
            name = question.document.name
            conversation = conversations[name]
            with screen.working(f"{name}: {question.text}"):
                answer = side.ask(conversation.prompt(question.text), f"{name}-{question.turn}")
            answers[name, question.turn] = answer
            screen.asked(question, answer, None)
            conversation.go_on(question.text, answer.first_line, answer.prompt_tokens)
    return answers


def _play_ember(
    side: EmberSide, documents: Sequence[Document], answers: dict[Asked, Answer], screen: Screen
) -> list[Phase]:
    """Ask the same with the same conversations; what each prompt was served from is kept."""
    conversations = {document.name: Conversation(document) for document in documents}
    next_phase = Phase(NEXT_QUESTION.name, NEXT_QUESTION.source)
    phases: list[Phase] = []
    for number, visit in enumerate(VISITS):
        screen.heading(visit.name)
        phase = Phase(visit.name, visit.source)
        phases.append(phase)
        side.begin(visit.before, phase)
        for question in questions_of(number, documents):
            name = question.document.name
            conversation = conversations[name]
            with screen.working(f"{name}: {question.text}"):
                prompt = conversation.prompt(question.text)
                reply = side.ask_witnessed(prompt, f"{name}-{question.turn}")
            baseline = answers[name, question.turn]
            turn = Turn(
                document=name,
                known_tokens=conversation.known_tokens,
                answer=reply.answer,
                baseline=baseline,
                engine=reply.engine,
                ember=reply.ember,
                logged=reply.logged,
            )
            (phase if question.returning else next_phase).turns.append(turn)
            screen.asked(question, reply.answer, reply.engine)
            conversation.go_on(question.text, baseline.first_line, reply.answer.prompt_tokens)
        side.end(phase)
    return [*phases, next_phase]


def facts_of(phase: Phase) -> dict[str, object]:
    """What was measured in a phase, in plain values."""
    return {
        "phase": phase.name,
        "problems": phase.problems(),
        "promoted_tokens": phase.promoted_tokens,
        "promoted_and_used_tokens": phase.promoted_and_used_tokens,
        "first_token_s": [turn.answer.first_token_s for turn in phase.turns],
        "baseline_first_token_s": [turn.baseline.first_token_s for turn in phase.turns],
    }


def verdict(phases: Sequence[Phase], screen: Screen) -> int:
    screen.table(phases)
    screen.ties(phases)
    failed = False
    for phase in phases:
        for problem in phase.problems():
            screen.fail(f"{phase.name}: {problem}")
            failed = True
    if not failed:
        screen.say("every phase was served from the tier it should")
    return EXIT_FAILED if failed else 0


def _write_request(scratch: Path, document: Document) -> None:
    """A request's body for `curl`."""
    prompt = Conversation(document).prompt(document.questions[0])
    plain = {**request_body(prompt, 32), "stream": False, "logprobs": None}
    del plain["stream_options"], plain["return_tokens_as_token_ids"]
    (scratch / REQUEST_FILE).write_text(json.dumps(plain), encoding="utf-8")


def _show_how_to_try(side: EmberSide, scratch: Path, screen: Screen) -> None:
    """Lines to copy, for a server that stays up."""
    body = scratch / REQUEST_FILE
    url = side.server.url
    screen.heading("The server stays up. Ask about the harbour's report again:")
    screen.plain(
        f"curl -s {url}/v1/completions -H 'Content-Type: application/json' "
        f"-d @{shlex.quote(str(body))}"
    )
    screen.say("where prompts came from:")
    screen.plain(f"curl -s {url}/metrics | grep ^emberkv")
    screen.say(f"to end it (the keeper follows within {KEEP_S} s) and remove what it wrote:")
    screen.plain(f"kill {side.server.pid}; rm -r {shlex.quote(str(scratch))}")


if __name__ == "__main__":
    sys.exit(main())
