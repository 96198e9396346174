"""The demo's documents: as long as they should be, the same each time, distinct from the start."""

from __future__ import annotations

import re

from demo.documents import DOCUMENT_TOKENS, QUESTION_COUNT, Document, make_documents
from demo.script import VISITS, Conversation, questions_of


def tokens(text: str) -> int:
    """About as many as the model's tokenizer makes of such a text."""
    return len(text) // 3


def test_equal_seeds_give_equal_texts_and_others_do_not() -> None:
    assert make_documents(tokens, seed=7) == make_documents(tokens, seed=7)
    assert make_documents(tokens, seed=7) != make_documents(tokens, seed=8)


def test_documents_are_long_enough_and_hardly_longer() -> None:
    for document in make_documents(tokens):
        assert DOCUMENT_TOKENS <= tokens(document.text) < DOCUMENT_TOKENS + 100


def test_no_two_documents_share_a_beginning() -> None:
    """Else a part of one would come from another's blocks."""
    assert len({document.text[:20] for document in make_documents(tokens)}) == 3


def test_each_question_is_asked_once_and_is_about_its_document() -> None:
    for document in make_documents(tokens):
        assert len(set(document.questions)) == QUESTION_COUNT == 2 * len(VISITS)
        asked = [q.text for n in range(len(VISITS)) for q in questions_of(n, [document])]
        assert asked == list(document.questions)
        for question in document.questions:
            names = re.findall(r"(?<!^)\b[A-Z]\w+|\d+", question)
            assert names
            assert all(name in document.text for name in names)


def test_a_conversation_repeats_everything_said() -> None:
    talk = Conversation(Document("a", "A text.", ("Why?", "How?")))
    first = talk.prompt("Why?")
    talk.go_on("Why?", "Because.", prompt_tokens=9)
    assert first.endswith("A text.\n\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert talk.prompt("How?").startswith(f"{first}Because.<|im_end|>")
    assert "How?" in talk.prompt("How?")
    assert talk.known_tokens == 9
