"""The form of the README and the docs: links, the menu, tables, what the search finds. tests/test_docs.py runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from attention_service.comparison.candidates import MESSAGES
from tests.helpers.documents import BLOCK, PAGES, ROOT, anchors, links

# Most words of a cell, and the generated tables that may have more, each with the reason.
CELL = 30
LONG_TABLES = {
    "fields": "the descriptions of the API document, each of which stands alone in an editor and in Swagger",
    "settings": "what `attention-service settings` prints, for an operator who has no site",
}
# What readers look for by other names than those of the fields, and find.
SEARCHED = (
    "GQA", "MQA", "MLA", "KV cache", "BertViz", "head_view", "fully masked", "bottom-right", "top-left",
    "logit softcap", "attention sink", "RoPE", "ALiBi", "cu_seqlens", "sliding window", "output_attentions",
    "softmax_lse",
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_links_have_targets(page: Path) -> None:
    """Links within the project lead to a file and heading that exist; other links are well formed."""
    for link in links(page):
        target = urlsplit(link)
        if target.scheme or target.netloc:
            assert re.fullmatch(r"https://([a-z0-9-]+\.)+[a-z]+(/[!-~]*)?", link), link
            continue
        file = page.parent / target.path if target.path else page
        assert file.exists(), link
        assert not target.fragment or target.fragment in anchors(file), link


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_cell_of_a_table_is_a_paragraph(page: Path) -> None:
    """A reader scans a table. What takes more words stands below it."""
    cells = [cell for name, row in rows(page) if name not in LONG_TABLES for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > CELL] == []


def rows(page: Path) -> Iterator[tuple[str, str]]:
    """The rows of all tables of a page, each with the name of its table if it is generated."""
    name = ""
    for line in BLOCK.sub("", page.read_text(encoding="utf-8")).splitlines():
        if marker := re.match(r"<!-- (\w+)", line):
            name = "" if marker[1] == "end" else marker[1]
        if line.startswith("|"):
            yield name, line


def test_the_generated_tables_with_long_cells_exist() -> None:
    assert set(LONG_TABLES) <= {name for page in PAGES for name, _ in rows(page)}


@pytest.mark.parametrize("words", SEARCHED)
def test_the_search_of_the_site_finds_what_readers_look_for(words: str) -> None:
    """By a heading, which the search ranks first, or in the text of a page that is not the changelog."""
    pages = [page.read_text(encoding="utf-8").lower() for page in PAGES if page.parent.name == "docs"]
    assert any(words.lower() in text for text in pages)
    heading = re.compile(rf"^#+ .*{re.escape(words.lower())}", re.MULTILINE)
    assert any(heading.search(text) for text in pages) or sum(words.lower() in text for text in pages) > 1


def test_the_mistakes_that_the_readme_names_are_known() -> None:
    for page in ("README.md", "docs/exactness.md"):
        named = re.findall(r"^\|.*\| `([a-z_.]+)` \|$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert len(named) == 6, page
        assert [name for name in named if name not in MESSAGES] == [], page


def test_every_page_of_the_site_is_in_the_menu() -> None:
    menu = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_list_for_operators_has_twelve_lines_that_lead_further() -> None:
    text = (ROOT / "docs" / "go-live.md").read_text(encoding="utf-8")
    items = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(items) == 12
    assert [item for item in items if "](" not in item] == []


def test_every_mentioned_make_target_and_variable_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
        for command in re.findall(r"`make ([^`]+)`", text):
            for variable in re.findall(r"\b([A-Z_]+)=", command):
                assert f"$({variable})" in makefile, f"{page.name}: {variable} of make {command}"
