"""Finding files, reading lists of them, and loading these."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import LIMIT
from hypothesis import given
from hypothesis import strategies as st

from enqueuer import (
    DataFileError,
    FrameworkUnavailable,
    OrderedEnqueuer,
    Processes,
    WorkerDied,
)
from enqueuer.datasets.files import find_files, image_folder, load_array, read_list, split

TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"), min_size=1, max_size=8
)


def listed(folder, text, **options):
    """Write a list into a folder, and read it; return (path, label) with relative paths."""
    path = Path(folder, "train.txt")
    path.write_text(text, encoding="utf-8", newline="")
    return [(os.path.relpath(p, folder), label) for p, label in read_list(path, **options)]


def quoted(text):
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


@pytest.mark.thorough
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1), st.sampled_from(["\n", "\r\n"]))
def test_whatever_is_in_quotes_comes_back(tmp_path_factory, entries, end):
    path = tmp_path_factory.getbasetemp() / "train.txt"
    lines = [f" {quoted(name)}\t{quoted(label)} # {label}" for name, label in entries]
    path.write_text("".join(line + end for line in lines), encoding="utf-8", newline="")
    assert read_list(path, label=str) == [
        (os.path.join(path.parent, name), label) for name, label in entries
    ]


def test_comments_and_empty_lines_are_left_out(tmp_path):
    text = "# all of them\n\n  \na.png 1 # good\n #b.png 2\nc#1.png 3\n'#d.png' 4"
    assert listed(tmp_path, text) == [("a.png", 1), ("c#1.png", 3), ("#d.png", 4)]


def test_blanks_and_quotes_within_a_field_are_its_own(tmp_path):
    text = "'a b.png' \"hot dog\"\nit's.png cat\n\"say \\\"c\\\".png\" 'it''s'\n"
    with pytest.raises(ValueError, match=r"train\.txt, line 3: a quote is not closed, or more"):
        listed(tmp_path, text)
    text = text.replace("'it''s'", "d\\e")
    assert listed(tmp_path, text) == [
        ("a b.png", "hot dog"), ("it's.png", "cat"), ('say "c".png', "d\\e")
    ]  # fmt: skip


def test_paths_are_relative_to_the_list(tmp_path, monkeypatch):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "train.txt").write_text("a.png\n/b.png\n../c.png\n")
    monkeypatch.chdir(tmp_path)
    assert [path for path, _ in read_list("lists/train.txt")] == [
        "lists/a.png", "/b.png", "lists/../c.png"
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path / "lists")
    assert read_list("train.txt")[0] == ("a.png", None)


def test_labels_are_ints_if_all_are_written_as_ints(tmp_path):
    assert listed(tmp_path, "a 0\nb -3\nc\n") == [("a", 0), ("b", -3), ("c", None)]
    assert listed(tmp_path, "a 0\nb x\n") == [("a", "0"), ("b", "x")]
    assert listed(tmp_path, "a 7\nb 007\n") == [("a", "7"), ("b", "007")]
    assert listed(tmp_path, "a 0\n", label=str) == [("a", "0")]
    assert listed(tmp_path, "a 0.5\n", label=float) == [("a", 0.5)]


def test_a_wrong_line_is_named_by_its_number(tmp_path):
    with pytest.raises(
        ValueError, match=r"train\.txt, line 2: 3 fields.* contains blanks: 'b c\.png 1'"
    ):
        listed(tmp_path, "a.png 1\nb c.png 1\n")
    with pytest.raises(ValueError, match=r"line 1: a quote is not closed"):
        listed(tmp_path, "'a.png 1\n")
    with pytest.raises(ValueError, match=r"line 1: the path is empty"):
        listed(tmp_path, "'' 1\n")
    with pytest.raises(ValueError, match=r"line 3: the label 'x' is wrong: .*'x'"):
        listed(tmp_path, "a 1\n\nb x\n", label=float)


def test_a_mark_of_utf8_and_names_that_are_not_utf8_are_read(tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes(b"\xef\xbb\xbfa.png\n\xff.png\n")
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(b"it")
    first, second = read_list(path)
    assert os.path.basename(first[0]) == "a.png"
    assert Path(second[0]).read_bytes() == b"it"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_has_a_header(tmp_path, separator):
    path = tmp_path / "Train.CSV"
    path.write_text('\ufeffid,file,label\n0,"a, b.png",3\n\n1,c.png,5\n'.replace(",", separator))
    found = read_list(path, columns=("file", "label"))
    first = "a, b.png".replace(",", separator)
    assert found == [(str(tmp_path / first), 3), (str(tmp_path / "c.png"), 5)]
    path.write_text("file\na.png\n")
    assert read_list(path) == [(str(tmp_path / "a.png"), None)]
    path.write_text("2019, file\n8, a.png\n")
    assert read_list(path, columns=("file", "2019")) == [(str(tmp_path / "a.png"), 8)]


@pytest.mark.parametrize(
    ("name", "text", "columns", "says"),
    [
        ("a.csv", "id,file,label\n0,a,1\n", None, r"line 1: give columns=.*'id', 'file', 'label'"),
        ("a.csv", "file,label\na,1\n", ("file", "class"), "line 1: give columns="),
        ("a.csv", "", None, "give columns="),
        ("a.csv", "file,label\n", None, r"a\.csv: there are no paths in this list"),
        ("a.txt", "# none\n", None, r"a\.txt: there are no paths in this list"),
        ("a.csv", "d/x.png,cat\nd/y.png,dog\n", None, "line 1: it must be a header, .* like a row"),
        ("a.csv", "x.png\ny.png\n", None, "line 1: it must be a header"),
        ("a.csv", "img/a,cat\nimg/b,dog\n", None, "line 1: it must be a header"),
        ("a.csv", "d/x.png,cat\nd/y.JPG,dog\n", None, "line 1: it must be a header"),
        ("a.csv", "cat,x.png\ndog,y.png\n", None, "line 1: it must be a header"),
        ("a.csv", "path|label\nx.png|1\n", None, r"'path\|label' is one column; commas"),
        ("a.tsv", "path,label\nx.png,1\n", None, "'path,label' is one column; commas"),
        ("a.csv", "label,path\n1,x.png\n", None, r"give columns=\(of paths, of labels\)"),
        ("a.csv", "path,path\nx.png,1\n", None, r"give columns=\(of paths, of labels\)"),
        ("a.tsv", 'file\tlabel\na\t"b\nc\td"\n', None, "line 3: a field has several lines; is a"),
        ("a.txt", "x.png, 3\n", None, r"line 1: there is no file 'x\.png,'; a list with commas"),
        ("a.txt", "x.png;3\n", None, r"line 1: there is no file 'x\.png;3'"),
        ("a.csv", "a.png,x\nb.png,y\n", None, "line 1: it must be a header, .* looks like a row"),
        ("a.csv", "d/a.png,3\nb.png,5\n", None, "line 1: it must be a header, .*'d/a.png', '3'"),
        ("a.tsv", "file\tlabel\na\n", None, "line 2: 1 fields, and 2 in the header"),
        ("a.csv", "file,label\n,3\n", None, "line 2: the path is empty"),
        ("a.csv", 'file,label\n"a,3\n', None, r"line 2: unexpected end of data"),
        ("a.csv", "file,label\na,x\n", None, "line 2: the label 'x' is wrong"),
        ("a.txt", "a.png,3\n", None, r"line 1: there is no file 'a\.png,3'; a list with commas"),
        ("a.txt", "a.png 3\n", ("file", "label"), r"columns are those of a \.csv"),
    ],
)
def test_a_table_that_is_not_clear_is_refused(tmp_path, name, text, columns, says):
    (tmp_path / "a.png").touch()
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        read_list(tmp_path / name, label=int, columns=columns)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ("file,label\nx.png,é\n".encode("cp1252"), 2),
        ("file,label\né.png,x\n".encode("cp1252"), 2),
        ("fil\xe9,label\nx.png,x\n".encode("cp1252"), 1),
        ("file,label\nx.png,3\n".encode("utf-16"), 1),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_in_another_encoding_is_refused(tmp_path, data, line, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(data if ending == "csv" else data.replace(b",", b"\t"))
    with pytest.raises(ValueError, match=rf"line {line}: it is not UTF-8: .* `iconv -f"):
        read_list(path)


def test_rows_and_fields_without_anything(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\n \nfile,label\n\na.png,3\n,\n , \nb.png,\n")
    assert read_list(path) == [(str(tmp_path / "a.png"), 3), (str(tmp_path / "b.png"), None)]


def test_a_spreadsheet_may_name_its_separator(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("sep=;\npath;label\na,x.png;3\n")
    assert read_list(path) == [(str(tmp_path / "a,x.png"), 3)]


def test_only_tabs_divide_a_tsv_file(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("file\tnames, of, all\na.png\tx, y\n")
    assert read_list(path) == [(str(tmp_path / "a.png"), "x, y")]


def test_a_url_stays_as_it_is(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("file\ns3://b/a.png\nhttps://b/c.png\n")
    assert [url for url, _ in read_list(path)] == ["s3://b/a.png", "https://b/c.png"]


def test_a_label_that_a_table_of_labels_lacks_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"train\.txt, line 2: the label 'dog' is wrong"):
        listed(tmp_path, "a cat\nb dog\n", label={"cat": 0}.__getitem__)


def test_a_path_with_a_comma_is_a_path(tmp_path):
    (tmp_path / "a,b.png").touch()
    assert listed(tmp_path, "a,b.png\nc,d.png 3") == [("a,b.png", None), ("c,d.png", 3)]


# --- divided -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("balanced", [True, False])
def test_a_list_is_divided_in_its_order_with_the_share_of_each_label(share, balanced):
    pairs = [(number, min(number % 7, 3)) for number in range(700)]
    train, check = split(pairs, validation=share, random_seed=3, balanced=balanced)
    assert sorted(train + check) == pairs
    assert (train, check) == (sorted(train), sorted(check))
    assert len(check) == 700 * share
    if balanced:
        counts = np.bincount([label for _, label in check])
        assert abs(counts - share * np.array([100, 100, 100, 400])).max() <= 1
    assert split(pairs, validation=share, random_seed=3, balanced=balanced) == (train, check)
    assert split(pairs, validation=share, random_seed=4, balanced=balanced)[1] != check


def test_many_small_classes_have_the_share_together():
    train, check = split([(number, number) for number in range(100)], validation=0.1)
    assert (len(train), len(check)) == (90, 10)


@pytest.mark.parametrize(
    ("pairs", "options", "error", "says"),
    [
        ([("a", 1)] * 3, {}, ValueError, r"validation=0\.1 of 3 pairs are 0"),
        ([("a", 1)] * 3, {"validation": 1.5}, ValueError, "between 0 and 1, got 1.5"),
        (["a", "b"], {}, TypeError, "needs pairs with a label, got 'a'"),
    ],
)
def test_a_list_that_cannot_be_divided_is_refused(pairs, options, error, says):
    with pytest.raises(error, match=says):
        split(pairs, **options)


# --- found ---------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    for name in ("b/2.png", "b/10.png", "a/c/1.png", "0.png", "0.txt", ".d/3.png", ".4.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "lost.png").symlink_to(tmp_path / "nowhere")
    return tmp_path


def test_files_are_found_sorted_and_once(tree):
    found = find_files("b/*.png", "./b//*.png", "**/*.png", "*.txt", root=tree)
    names = ["0.png", "0.txt", "a/c/1.png", "b/10.png", "b/2.png"]
    assert found == [str(tree / name) for name in names]


def test_without_a_root_they_are_relative_to_where_one_is(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert find_files(Path("b", "*")) == ["b/10.png", "b/2.png"]
    assert find_files("*", root="b") == ["b/10.png", "b/2.png"]
    assert find_files(str(tree / "b" / "*")) == [str(tree / "b/10.png"), str(tree / "b/2.png")]


def test_the_roots_own_name_is_no_pattern(tmp_path):
    (tmp_path / "[a]*").mkdir()
    (tmp_path / "[a]*" / "1.png").touch()
    assert find_files("*.png", root=tmp_path / "[a]*") == [str(tmp_path / "[a]*" / "1.png")]


def test_links_that_go_in_circles_give_each_file_once(tree):
    (tree / "a" / "up").symlink_to("..")
    (tree / "a" / "c" / "self").symlink_to(".")
    (tree / "b" / "to_a").symlink_to(tree / "a")
    (tree / "a" / "to_b").symlink_to(tree / "b")
    found = find_files("**/*.png", root=tree)
    names = [
        "0.png", "a/c/1.png", "a/to_b/10.png", "a/to_b/2.png", "b/10.png", "b/2.png",
        "b/to_a/c/1.png",
    ]  # fmt: skip
    assert found == [str(tree / name) for name in names]


def test_a_link_to_a_folder_elsewhere_is_entered(tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("disk")
    (elsewhere / "x" / "y").mkdir(parents=True)
    (elsewhere / "x" / "y" / "7.png").touch()
    (tree / "linked").symlink_to(elsewhere)
    assert find_files("linked/**/*.png", root=tree) == [str(tree / "linked/x/y/7.png")]
    assert str(tree / "linked/x/y/7.png") in find_files("**/*.png", root=tree)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**", ["0.png", "0.txt", "a/c/1.png", "b/10.png", "b/2.png"]),
        ("**/c/**/*.png", ["a/c/1.png"]),
        ("*/**/*.png", ["a/c/1.png", "b/10.png", "b/2.png"]),
        ("**/b/2.png", ["b/2.png"]),
        ("**/.*.png", [".4.png"]),
    ],
)
def test_two_stars_are_any_number_of_folders(tree, monkeypatch, pattern, names):
    assert find_files(pattern, root=tree) == [str(tree / name) for name in names]
    assert find_files(str(tree / pattern)) == [str(tree / name) for name in names]
    monkeypatch.chdir(tree)
    assert find_files(pattern) == names


@pytest.mark.parametrize("pattern", ["*.gif", "folder.*", "lost.png"])
def test_patterns_that_match_no_file_are_an_error(tree, pattern):
    with pytest.raises(FileNotFoundError, match=r"no file matches '\*\.bmp' or .* in .*"):
        find_files("*.bmp", pattern, root=tree)
    assert find_files("*.png", pattern, root=tree) == [str(tree / "0.png")]


def test_no_pattern_is_an_error():
    with pytest.raises(TypeError, match="needs a pattern"):
        find_files()


def test_each_folder_is_a_class(tmp_path):
    for name in ("b/1.PNG", "b/c/0.jpeg", "a [x]/2.png", "a [x]/._2.png", ".d/3.png", "0.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "round").symlink_to(tmp_path)
    files, classes = image_folder(tmp_path)
    assert classes == ["a [x]", "b"]
    expected = [("a [x]/2.png", 0), ("b/1.PNG", 1), ("b/c/0.jpeg", 1)]
    assert files[:3] == [(str(tmp_path / name), label) for name, label in expected]
    with pytest.raises(FileNotFoundError, match=r"class 'a \[x\]' in .* has no file with one of"):
        image_folder(tmp_path, ".jpeg")
    (tmp_path / "c").mkdir()
    with pytest.raises(FileNotFoundError, match=r"class 'c' in .* has no file with"):
        image_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no folders"):
        image_folder(tmp_path / "c")


# --- loading ---


def label_of(file):
    return load_array(file[0])


@pytest.mark.parametrize(
    ("kind", "of"),
    [(list, str), (tuple, Path), (list, lambda path: (path, 3)), (list, lambda path: [path, 3])],
    ids=["paths", "a tuple", "pairs", "lists"],
)
def test_an_error_names_the_file(kind, of, backend, tmp_path, caplog):
    (tmp_path / "b.npy").touch()
    np.save(tmp_path / "a.npy", np.zeros(3))
    paths = [str(tmp_path / name) for name in ("a.npy", "b.npy")]
    files, function = kind(map(of, paths)), load_array
    if isinstance(files[0], (tuple, list)):
        function = label_of
    with OrderedEnqueuer(files, function, **backend) as enqueuer:
        with pytest.raises(DataFileError) as caught:
            list(enqueuer)
    says = f"{paths[1]}: it is no .npy or .npz file, or it is empty"
    assert str(caught.value) == says
    assert caught.value.path == paths[1]
    assert caught.value.__notes__[-1].endswith(f"task 1, element 1 ({paths[1]!r})")
    options = dict(batch_size=2, on_error="skip", max_errors=1)
    with OrderedEnqueuer(files, function, **options, **backend) as enqueuer:
        assert [len(batch) for batch in enqueuer] == [1]
        assert [text for _, text in enqueuer.skipped] == [repr(caught.value)]
    assert f"task 0, element 1 ({paths[1]!r}): {caught.value!r}" in caplog.text


def killed_at_137(path):
    if path.endswith("137.bin"):
        # While other threads load others.
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.001)
    return len(path)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 64},
        {"batch_size": 64, "max_restarts": 1},
        {"batch_size": 64, "element_timeout": 60},
        {"batch_size": 64, "concurrency": 2},
        {"concurrency": 2},
    ],
    ids=str,
)
def test_a_worker_that_dies_names_the_file(start_method, options):
    paths = [f"/data/{number:03}.bin" for number in range(256)]
    backend = Processes(start_method=start_method)
    with OrderedEnqueuer(paths, killed_at_137, workers=2, backend=backend, **options) as enqueuer:
        with pytest.raises(WorkerDied) as caught:
            list(enqueuer)
    of_several = r"one of the elements .*" if "concurrency" in options else "element "
    says = rf"It ran ({of_several}|element )137 \('/data/137\.bin'\)"
    assert re.search(says, str(caught.value))
    assert "137.bin" in caught.value.__notes__[-1]
    assert str(caught.value).count(".bin") <= 2


async def dies_at_7(path):
    if path == "7":
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(LIMIT)


def test_a_worker_of_coroutines_that_dies_names_the_files():
    paths = [*map(str, range(16))]
    with OrderedEnqueuer(paths, dies_at_7, workers=1, backend="process") as enqueuer:
        with pytest.raises(WorkerDied, match=r"It ran one of the elements .*7 \('7'\)"):
            list(enqueuer)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_without_a_task_names_no_file():
    backend = Processes(initializer=dies)
    with OrderedEnqueuer(["a.jpg"], len, workers=1, backend=backend) as enqueuer:
        with pytest.raises(WorkerDied) as caught:
            list(enqueuer)
    assert "It ran" not in str(caught.value)


def test_a_long_text_is_named_in_short():
    texts = ["a" * 9000, "b" * 9000]
    with OrderedEnqueuer(texts, int) as enqueuer, pytest.raises(ValueError, match="inv") as caught:
        list(enqueuer)
    assert re.search(r"element 0 \('a+\.\.\.a+'\)$", caught.value.__notes__[-1])
    assert len(caught.value.__notes__[-1]) < 300


def lacking(path):
    raise FrameworkUnavailable("pip install it")


def test_a_missing_package_is_no_fault_of_a_file(backend):
    with OrderedEnqueuer(["a", "b"], lacking, on_error="skip", **backend) as enqueuer:
        with pytest.raises(FrameworkUnavailable):
            list(enqueuer)
