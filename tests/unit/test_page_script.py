"""The checker of pages finds what is not as the page says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from page_script import blocks_of, pattern_of, script_of, share_out

PAGE = """
```bash
COUNT=3
show() { echo "$COUNT ships in 12ms, 64.0 MiB"; }
```

```json
{"not": "run"}
```

```bash
show
false
echo over
```

```text
7 ships in 5.1s, 3 KiB
over
```
"""


def test_blocks_share_a_shell_and_what_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    blocks = list(blocks_of(tmp_path / "page.md"))
    assert len(blocks) == 2
    done = subprocess.run(
        ["bash"], check=False, input=script_of(blocks), capture_output=True, text=True
    )
    assert share_out(done.stdout, blocks)
    assert [block.failed for block in blocks] == [[], [(1, "false")]]
    assert [block.missing() for block in blocks] == [[], []]
    blocks[1].shown.append("7 ships")  # not again after `over`
    assert blocks[1].missing() == ["7 ships"]


def test_a_server_that_does_not_come_up_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```bash\nup() { return 1; }\nup\necho never\n```\n")
    blocks = list(blocks_of(tmp_path / "page.md"))
    done = subprocess.run(
        ["bash"], check=False, input=script_of(blocks), capture_output=True, text=True
    )
    assert not share_out(done.stdout, blocks)
    assert "never" not in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("shown", "seen", "matches"),
    [
        ("ram  on  256 MiB  (139ms)", "ram on 1.0 GiB 12.5s", True),
        ("ram  on  256 MiB", "ram off 256 MiB", False),
        ("… of 36 figures …", "none of 20 figures is over", True),
        ("got 384 of 400 (384 device)", "got 0 of 12 (0 device)", True),
        ("got 384 of 400 (384 device)", "got 0 of 12 (0 RAM)", False),
        ("0.42x  (0.36x)", "1.84x! 1.00x?", True),
    ],
)
def test_numbers_may_differ_and_words_may_not(shown: str, seen: str, *, matches: bool) -> None:
    import re

    assert (re.search(pattern_of(shown), seen) is not None) is matches
