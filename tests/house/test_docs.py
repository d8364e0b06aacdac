"""The pages and the project's files say what is there: names, errors, files, commands."""

import ast
import itertools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import reading_cost

import enqueuer
from enqueuer import Bottleneck, cli, errors

ROOT = Path(__file__).parents[2]
PACKAGE = Path(enqueuer.__file__).parent
DOCS = ROOT / "docs"
# As for the programs of that folder.
sys.path.append(str(DOCS))

from svg import DARK, in_dark, in_light  # noqa: E402

DRAWINGS = runpy.run_path(str(DOCS / "drawings.py"))["DRAWINGS"]

README_COMMANDS = [
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[demo]'"
    " && .venv/bin/python -m enqueuer demo",
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]'"
    " && .venv/bin/python -m pytest -n 6 --dist worksteal",
]


def read(*names: str) -> str:
    return ROOT.joinpath(*names).read_text(encoding="utf-8")


def described(page: str) -> set[str]:
    """Return the names for which a page has a directive."""
    return set(re.findall(r"^\.\. auto\w+:: (\w+)", page, re.MULTILINE))


def error_classes() -> set[str]:
    kinds = (errors.EnqueuerError, errors.EnqueuerWarning)
    return {
        c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, kinds)
    }


def test_every_public_name_has_a_place_in_the_reference():
    pages = read("docs", "reference", "api.rst") + read("docs", "reference", "errors.rst")
    assert described(pages) == set(enqueuer.__all__) - {"__version__"}


def test_the_page_of_messages_finds_those_of_each_class():
    program = runpy.run_path(str(DOCS / "messages.py"))
    messages, composed = program["messages"](), program["COMPOSED"]
    listed = {kind for kind, texts in messages.items() if texts} | set(composed)
    assert error_classes() - {"EnqueuerError"} <= listed
    shown = re.findall(r"^\.\. messages:: (.*)", errors_page(), re.MULTILINE)
    assert {kind for kinds in shown for kind in kinds.split()} == {*messages, *composed}
    assert "the generator has ended; iterate again for the next epoch" in messages["Closed"]
    assert "the buffer is closed" in messages["Closed"]
    assert messages["ValueError"]["rank must be < world_size, got rank=... with world_size=..."]
    texts = [text for kind in messages.values() for text in kind]
    assert len(texts) > 250
    assert not [text for text in texts if "\n" in text or "...." in text]


@pytest.mark.parametrize("name", sorted(error_classes() - {"EnqueuerError", "EnqueuerWarning"}))
def test_an_explanation_names_cause_and_solution(name):
    page = read("docs", "reference", "errors.rst")
    body = page.split(f".. autoexception:: {name}\n", 1)[1].split(".. autoexception::", 1)[0]
    assert "**Cause:**" in body
    assert "**Solution:**" in body


def test_the_design_page_lists_every_file_with_a_sentence():
    assert "\n.. files::\n" in read("docs", "design.rst")
    lines = list(runpy.run_path(str(DOCS / "files.py"))["tree"]())
    assert (
        len(lines) == len(list(PACKAGE.rglob("*.py"))) + len(list(PACKAGE.rglob("__init__.py"))) - 1
    )
    assert [line for line in lines if re.search(r"\.py$", line)] == []


def test_every_page_is_reached_from_the_index():
    index = read("docs", "index.rst")
    pages = {p.relative_to(DOCS).with_suffix("").as_posix() for p in DOCS.rglob("*.rst")}
    listed = set(re.findall(r"^   ([\w/]+)$|:doc:`([\w/]+)`", index, re.MULTILINE))
    assert pages - {"index"} == {page for pair in listed for page in pair if page}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_every_page_that_is_linked_is_there(name):
    links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", read(name))
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_the_readme_has_exactly_the_two_commands():
    assert re.findall(r"```sh\n(.*?)\n```", read("README.md"), re.DOTALL) == README_COMMANDS


def test_the_pages_are_short():
    """A person reads README in minutes, and all pages in two hours."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.rst")]
    assert len(read("README.md").split()) <= 1_000
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 29_995


def test_the_links_of_the_readme_lead_to_files():
    """Nothing else is offered to be installed: the name of the package belongs to no one yet."""
    found = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", read("README.md"))
    links = {one or other for one, other in found}
    assert len(links) > 20
    assert {link for link in links if not (ROOT / link).exists()} == set()
    assert set(re.findall(r"pip install (?:-q )?(?:-e )?(\S+)", read("README.md"))) == {
        *(".", "'.[torch]'", "'.[demo]'", "'.[test]'")
    }


def test_the_bar_of_the_readme_shows_what_the_package_shows():
    change = Bottleneck("source", "", "", "workers=4").short
    assert f">waiting 47 % ({change})," in read("docs", "drawings", "progress.svg")


def test_the_rates_of_the_readme_are_those_of_the_page_of_workloads():
    """A claim has one value: README and the page that it names show the same measurement."""
    shown = re.findall(r"^\| `([\w-]+)`: .*?, \w+/s \| (.*) \|$", read("README.md"), re.MULTILINE)
    assert len(shown) >= 4
    for name, cells in shown:
        table = read("docs", "benchmarks", f"workload-{name}.csv")
        rates = dict(re.findall(r"^([^,\"]+),([^,]+),", table, re.MULTILINE))
        contestants = ("enqueuer", "torch", "plain loop")
        assert cells.split(" | ") == [rates[contestant] for contestant in contestants], name


def test_ci_runs_the_commands_of_the_readme():
    shown = subprocess.run(
        ["bash", ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, timeout=30
    )
    assert (shown.stdout.splitlines(), shown.stderr) == (README_COMMANDS, "")


def test_contributing_names_the_commands_that_tox_runs():
    contributing, tox = read("CONTRIBUTING.md"), read("tox.ini")
    for words in ("ruff check .", "ruff format --check .", "mypy", "-m pytest", "-W -n"):
        assert words in contributing, words
        assert words in tox, words


@pytest.mark.parametrize("command", ["demo", "pack", "inspect"])
def test_every_option_of_the_command_line_is_described(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert options <= set(re.findall(r"--[a-z][a-z-]+", read("docs", "reference", "cli.rst")))


def test_the_changelog_knows_this_version_or_what_comes_after_it():
    """As in Keep a Changelog: a version, and the date or Unreleased."""
    headings = re.findall(r"^## (.*)", read("CHANGELOG.md"), re.MULTILINE)
    for heading in headings:
        assert re.fullmatch(r"\[[\d.]+\] - (Unreleased|\d{4}-\d\d-\d\d)", heading), heading
    assert not [heading for heading in headings[1:] if heading.endswith("Unreleased")]


def test_entries_of_the_changelog_are_short():
    """Each is one line of at most 25 words."""
    lines = [line for line in read("CHANGELOG.md").splitlines() if line[:1] not in ("", "#")]
    entries = [line for line in lines[2:] if line.startswith("- ")]
    assert entries == lines[2:]
    assert [entry for entry in entries if len(entry.split()) > 26] == []


def text_files() -> list[Path]:
    skipped = {".git", ".venv", "venv", ".tox", "build", "dist", "__pycache__", ".hypothesis"}
    files = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not any(
            p in skipped or p.endswith(("_cache", "info")) for p in parts
        ):
            files.append(path)
    return files


def test_nothing_names_the_place_where_it_was_written():
    """The project must make sense to a stranger: no private paths, no tracker of somebody's own."""
    # put together here, so that this file does not find itself
    words = ["/" + "work/", "shared" + "/", "/" + "root/", "issues" + " show", "DESIGN" + ".md"]
    words += ["STYLE" + ".md", "reliability" + ".md"]
    found = []
    for path in text_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert found == []


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_what_its_program_draws(name, tmp_path):
    DRAWINGS[name]().write(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == read("docs", "drawings", f"{name}.svg")


def test_output_is_not_wider_than_its_box():
    """It is in a block of text, which wraps; in any other block, a reader must scroll."""
    css = read("docs", "static", "site.css")
    for kind in ("text", "console"):
        (style,) = re.findall(rf"^[^@\n]*\bdiv\.highlight-{kind} pre\b.*\{{(.*)\}}$", css, re.M)
        assert "white-space: pre-wrap" in style
    for page in DOCS.rglob("*.rst"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"^(?!\.\. ).*::$", text, re.MULTILINE) == [], page
        languages = set(re.findall(r"^\.\. code-block::(.*)$", text, re.MULTILINE))
        assert languages <= {f" {name}" for name in ("text", "console", "python", "sh", "diff")}


def test_the_key_sentence_stands_before_its_program():
    """The answer of `bottleneck()` is in the first screen of its page."""
    page = read("docs", "howto", "is_my_training_waiting.rst")
    head = page.split(".. code-block:: python")[0]
    assert len(head.split()) < 80
    assert re.search(r"The bottleneck is the source: .*: workers=4\.$", head, re.MULTILINE)


def test_every_picture_has_a_text_alternative():
    without = []
    for page in DOCS.rglob("*.rst"):
        pictures = re.findall(r"^ *\.\. image:: .*\n(.*)", page.read_text(), re.MULTILINE)
        without += [page.name for after in pictures if ":alt:" not in after]
    assert without == []


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_every_picture_has_a_form_for_dark_mode(path):
    picture = path.read_text()
    if path.stem.endswith("-dark"):
        light = path.with_stem(path.stem.removesuffix("-dark")).read_text()
        assert picture == in_dark(light)
        return
    assert in_dark(picture) != in_light(picture)
    # The build of the pages makes both forms, which no preference of the browser changes.
    for form in (in_dark(picture), in_light(picture)):
        assert "prefers-color-scheme" not in form
    assert not [colour for colour in DARK if f'"{colour}"' in in_dark(picture)]


def test_a_colour_without_one_for_dark_mode_is_named():
    with pytest.raises(ValueError, match="#123456 has no colour in DARK"):
        in_dark('<rect fill="#123456"/>')


def test_an_example_has_all_of_its_lines():
    """A line that continues another one follows it; doctest takes one that does not for text."""
    lost = []
    for page in [*DOCS.rglob("*.rst"), *PACKAGE.rglob("*.py")]:
        lines = [line.strip() for line in page.read_text(encoding="utf-8").splitlines()]
        for before, line in itertools.pairwise(lines):
            if line.startswith("... ") and not before.startswith((">>>", "...")):
                lost.append(f"{page.name}: {line}")
    assert lost == []


def test_the_citation_has_this_version():
    (version,) = re.findall(r"^version: (.*)$", read("CITATION.cff"), re.MULTILINE)
    assert version == enqueuer.__version__


def test_the_changelog_begins_with_this_version():
    heading = re.search(r"^## (.*)", read("CHANGELOG.md"), re.MULTILINE)[1]
    version, date = re.fullmatch(r"\[([\d.]+)\] - (.*)", heading).groups()
    is_open = date == "Unreleased"
    assert enqueuer.__version__ == (f"{version}.dev0" if is_open else version)


def test_the_release_checklist_names_each_file_with_a_placeholder():
    placeholder = "example" + ".invalid"
    files = {path for path in text_files() if placeholder in path.read_text(errors="ignore")}
    named = {path for path in files if f"`{path.name}`" in read("RELEASING.md")}
    assert files - named == {ROOT / "RELEASING.md"}


def errors_page() -> str:
    return read("docs", "reference", "errors.rst")


def symptoms() -> str:
    return errors_page().split(".. autoexception::")[0]


def test_the_messages_of_the_symptoms_are_those_of_the_code():
    quoted = re.findall(r"(?:^   - |; )`([^`]{12,})`(?::| in| after)", symptoms(), re.MULTILINE)
    assert len(quoted) > 15
    texts = set(texts_of_the_package())
    unknown = [text for text in quoted if not any(has_pieces(known, text) for known in texts)]
    assert unknown == []


def texts_of_the_package():
    """Yield the literal texts of the package, with a gap for each value in them."""
    for path in reading_cost.sources():
        for node in reading_cost.nodes(path):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "") for part in node.values)
                yield " ".join(part if isinstance(part, str) else "" for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def has_pieces(known: str, quoted: str) -> bool:
    """Return whether a text has the pieces between the dots of a quoted one, in their order."""
    for piece in filter(None, map(str.strip, quoted.split("..."))):
        _, found, known = known.partition(piece)
        if not found:
            return False
    return True


def test_the_contract_is_short():
    """Each of its sentences costs about 60 lines of code."""
    assert len(read("docs/reference/contract.rst").split()) <= 4_000
