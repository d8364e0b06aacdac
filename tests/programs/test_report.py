"""`enqueuer report`: what it prints, writes and returns, for traces whole and broken."""

import html.parser
import json
import os
import re
import threading
import time
import tracemalloc
import types

import pytest
from helpers import LIMIT, wait_until

from enqueuer import GeneratorEnqueuer, exports
from enqueuer.cli import main
from enqueuer.common import text
from enqueuer.monitoring import progress, trace_file
from enqueuer.tools import trace_report as trace

LOOP = {"pid": 1, "tid": 1}
S = 1_000_000  # microseconds


def worker(index, pid=None):
    return {"pid": 10 + index if pid is None else pid, "tid": 7}


def span(name, begin, end, where, **args):
    return {
        "name": name, "ph": "X", "ts": 5 * S + begin, "dur": end - begin, **where, "args": args,
    }  # fmt: skip


def instant(name, at, **args):
    return {"name": name, "ph": "i", "s": "p", "ts": 5 * S + at, **LOOP, "args": args}


def fill(at, items):
    return {"name": "queue", "ph": "C", "ts": 5 * S + at, **LOOP, "args": {"items": items}}


def name_of(where, name):
    return {"name": "thread_name", "ph": "M", **where, "args": {"name": name}}


ABOUT = dict(workers=2, backend="thread", max_queue_size=4, cpus=2, run=0)
STORY = [
    name_of(LOOP, "loop"),
    name_of(worker(0), "worker 0 (thread)"),
    name_of(worker(1), "worker 1 (<b>)"),
    instant("start", 0, **ABOUT),
    instant("epoch", 1000, epoch=0),
    span("wait", 2000, S, LOOP),
    *(
        event
        for item in range(4)
        for event in (
            span("work", S + item * S, S + item * S + S // 2, LOOP, shard=0, item=item),
            span("wait", S + item * S + S // 2, 2 * S + item * S, LOOP),
        )
    ),
    span("next", 0, 3 * S, worker(0), shard=0, item=0),
    span("send", 3 * S, 4 * S, worker(0), shard=0, item=0, bytes=2000),
    span("wait", 3 * S + S // 4, 4 * S, worker(0), **{"for": "room"}),
    span("wait", 0, 4 * S, worker(1), **{"for": "epoch"}),
    fill(0, 0),
    fill(3 * S, 4),
    instant("skipped", S, error="KeyError('<b>')", worker="worker 0 (thread)", shard=0, item=3),
    instant("restart", 2 * S, restarts=1),
    instant("stop", 5 * S),
]


def write(path, events=STORY, end="\n]\n"):
    head = trace_file.HEAD.decode() + ', "pid": 1, "args": {"format": 1}},\n'
    path.write_text(head + ",\n".join(map(json.dumps, events)) + end)
    return str(path)


def numbers_of(path):
    return types.SimpleNamespace(**trace.numbers_of(trace.read(str(path))))


class Page(html.parser.HTMLParser):
    """A page as a browser sees it: what it would load, and whether what opens closes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.loads, self.words = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data.strip())


def check(text):
    """Fail unless a page stands alone and is well-formed; return it."""
    seen = Page(text)
    assert seen.open == []
    assert seen.loads == []
    assert "script" not in seen.tags
    assert "http" not in text
    assert "url(" not in text
    return seen


def test_the_numbers_of_a_run_are_counted(tmp_path):
    numbers = numbers_of(write(tmp_path / "run.json"))
    assert numbers.items == 4
    assert numbers.seconds == 5
    assert numbers.items_per_second == 0.75  # 3 after the first, in 4 s
    assert numbers.first_batch == 1
    assert numbers.waited == 2
    assert numbers.waited_share == 0.5
    assert numbers.percentiles == {50: 0.5, 90: 0.5, 99: 0.5}
    assert numbers.making == 3 / 8
    assert numbers.sending == 0.25 / 8
    assert numbers.waiting == 4.75 / 8
    assert (numbers.errors, numbers.skipped, numbers.restarts) == (0, 1, 1)


def test_measurements_of_the_enqueuer_have_priority_over_the_spans(tmp_path):
    """It is what its bottleneck says."""
    totals = dict(items=4, waiting_us=1_000_000, working_us=3_000_000)
    events = [*STORY, instant("bottleneck", 5 * S, text="All is well.", **totals)]
    numbers = numbers_of(write(tmp_path / "run.json", events))
    assert (numbers.waited, numbers.waited_share, numbers.items_per_second) == (1, 0.25, 0.75)


def test_the_start_of_each_run_is_left_out(tmp_path):
    """Also that of the second one, which was not stopped."""
    later = [{**event, "ts": event["ts"] + 10 * S} for event in STORY if "ts" in event]
    totals = dict(items=4, waiting_us=2_000_000, working_us=2_000_000)
    events = [*STORY, instant("bottleneck", 5 * S, **totals), *later]
    numbers = numbers_of(write(tmp_path / "run.json", events))
    assert (numbers.items, numbers.waited, numbers.waited_share) == (8, 4, 0.5)
    assert numbers.items_per_second == 0.75


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_one_run_has_one_share_of_waiting_and_one_rate(tmp_path, backend, capsys):
    """In the statistics, the bottleneck, the log line, the bar and the report."""
    path, bars = tmp_path / "run.json", []

    def source(shard):
        for number in range(12):
            time.sleep(0.01)
            yield number

    class Bar:
        def __init__(self, **options):
            bars.append(self)

        def update(self, more):
            pass

        def set_postfix_str(self, text, refresh):
            self.text = text

        def close(self):
            pass

    options = dict(workers=2, trace=path, progress=Bar, backend=backend)
    with GeneratorEnqueuer(source, **options) as enqueuer:
        # A long start would be the bottleneck.
        wait_until(lambda: enqueuer.stats().queue_size > 0)
        for _ in enqueuer:
            time.sleep(0.002)
    [bar] = bars
    stats = enqueuer.stats()
    share, rate = text.percent(stats.waiting_share), text.rate(stats.items_per_s)
    numbers = numbers_of(path)
    assert numbers.waited_share == pytest.approx(stats.waiting_share, rel=1e-3)
    assert numbers.items_per_second == pytest.approx(stats.items_per_s, rel=1e-3)
    assert main.main(["report", str(path)]) == 0
    said = [*capsys.readouterr().out.splitlines(), str(stats), exports.line(stats), bar.text]
    said.append(trace.page(trace.read(str(path))))
    words = html.unescape("\n".join(said))
    shares = re.findall(r"(?:loop wait\w*|it waited|^waiting) ([\d.]+ %)", words, re.MULTILINE)
    # Beside those of the sentence, which not every bottleneck has.
    assert len(shares) >= 5, words
    assert set(shares) == {share}
    rates = re.findall(r"([\d.,]+) (?:a second|batches/s)", words)
    assert set(rates) == {rate}
    # The line and the bar have the kind and the change; the report has the whole sentence.
    found = stats.bottleneck()
    shown = (exports.line(stats), progress.postfix(stats))
    assert all(f" {share} ({found.short})" in one for one in shown), shown
    assert words.count(str(found)) == 3


def test_a_worker_and_its_successor_are_one_row(tmp_path):
    events = [
        name_of(worker(0), "worker 0 (process 10)"),
        name_of(worker(0, pid=11), "worker 0 (process 11)"),
        span("send", 0, 10, worker(0)),
        span("send", 20, 30, worker(0, pid=11)),
    ]
    rows = trace.read(write(tmp_path / "run.json", events)).rows
    assert [(row.name, row.items) for row in rows] == [("worker 0 (process 11)", 2)]


def test_the_page_stands_alone_and_says_it_all(tmp_path, capsys):
    path = write(tmp_path / "run.json")
    assert main.main(["report", path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 items in 5 s, 0.75 a second after the first",
        "first batch after 1 s",
        "after that the loop waited 50 % of its time (p50 500 ms, p90 500 ms, p99 500 ms)",
        "workers: 38 % making, 3.1 % sending, 59 % waiting",
        "0 errors, 1 skipped, 1 restart",
        str(tmp_path / "run.html"),
    ]
    text = (tmp_path / "run.html").read_text()
    seen = check(text)
    rows = [re.split("  +", line) for line in "\n".join(seen.words).splitlines()]
    assert ["Who waited", "items", "sent", "making", "sending", "waiting"] in rows
    assert ["worker 0 (thread)", "1", "2.0 kB", "75 %", "6.2 %", "19 %"] in rows
    assert ["Slowest items", "took", "begun after"] in rows
    assert ["shard 0, item 0", "3 s", "0 s"] in rows
    assert "worker 1 (<b>)" in [row[0] for row in rows]
    assert "(<b>)" not in text


def test_the_last_bottleneck_has_its_place(tmp_path, capsys):
    bottlenecks = [
        instant("bottleneck", 4 * S, text="Old."),
        instant("bottleneck", 5 * S, text="4 < 5."),
    ]
    path = write(tmp_path / "run.json", [*STORY, *bottlenecks])
    assert main.main(["report", path]) == 0
    assert "4 < 5." in capsys.readouterr().out
    text = (tmp_path / "run.html").read_text()
    assert "4 &lt; 5." in text
    assert "Old." not in text


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_run_is_reported(tmp_path, backend, capsys):
    path, target = tmp_path / "run.json", tmp_path / "page.html"
    with GeneratorEnqueuer(lambda: iter(range(3000)), trace=path, backend=backend) as enqueuer:
        list(enqueuer)
    assert main.main(["report", str(path), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith("3,000 items in ")
    check(target.read_text())
    assert target.stat().st_size < 200_000


@pytest.mark.thorough
def test_many_events_make_no_large_page(tmp_path):
    events = [name_of(worker(0), "worker 0 (thread)"), instant("start", 0, **ABOUT)]
    for item in range(20_000):
        at = 100 * item
        events.append(span("next", at, at + 60, worker(0)))
        events.append(span("send", at + 60, at + 100, worker(0)))
        events.append(span("work", at + (item % 7) * 5, at + 90, LOOP))
        events.append(fill(at, item % 9))
    text = trace.page(trace.read(write(tmp_path / "run.json", events)))
    check(text)
    assert len(text) < 150_000


@pytest.mark.parametrize("events", [STORY[:4], STORY[:6], STORY[3:4], STORY[-1:]])
def test_a_run_in_which_little_happened_has_a_page(tmp_path, events):
    check(trace.page(trace.read(write(tmp_path / "run.json", events))))


def test_what_a_crash_left_is_shown(tmp_path, capsys):
    path = tmp_path / "run.json"
    write(path, end=',\n{"name": "wait", "ph": "X", "ts": 50')
    assert main.main(["report", str(path)]) == 0
    text = (tmp_path / "run.html").read_text()
    check(text)
    assert "the trace has no end" in text
    assert "1 event could not be read and left out" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "nothing was recorded"),
        (b"\x89PNG\r\n", "not a trace"),
        (b'[{"name": "x", "ph": "X"}]', "not a trace"),
        (trace_file.HEAD + b', "pid": 1},\n', "nothing was recorded"),
        (trace_file.HEAD + b', "pid": 1},\n[1, 2],\n{"ph": "X", "pid": 3},\n7\n', "nothing was"),
    ],
)
def test_a_file_that_is_no_trace_is_reported_in_a_line(tmp_path, content, says, capsys):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    assert main.main(["report", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"enqueuer: {re.escape(str(path))}: {says}.*\n", printed.err)
    assert not (tmp_path / "run.html").exists()


def test_the_page_does_not_take_the_place_of_the_trace(tmp_path, capsys):
    path = write(tmp_path / "run.html")
    assert main.main(["report", path]) == 1
    assert "give a name for the page with -o" in capsys.readouterr().err
    assert main.main(["report", path, "-o", path]) == 1
    assert "give another name for the page\n" in capsys.readouterr().err
    assert trace.read(path).items


UNKNOWN = {"pid": 3, "tid": 4}
HUGE = 10**30
BAD = {
    "ts": span("next", 0, 5, UNKNOWN) | {"ts": "now"},
    "dur": span("next", 0, 5, UNKNOWN) | {"dur": None},
    "negative": span("work", 9, 5, LOOP),
    "bool": span("work", 0, 5, LOOP) | {"ts": True},
    "huge time": span("work", 0, 5, LOOP) | {"ts": HUGE},
    "late time": instant("error", 10**17, error="late"),
    "tid": span("work", 0, 5, LOOP) | {"tid": [1]},
    "args": span("work", 0, 5, LOOP) | {"args": [1]},
    "bytes": span("send", 0, 5, worker(0), bytes="many"),
    "huge bytes": span("send", 0, 5, worker(0), bytes=HUGE),
    "thread": name_of(worker(0), ["worker 0"]),
    "no phase": {"pid": 1, "ts": 5 * S},
    "phase": span("work", 0, 5, LOOP) | {"ph": ["X"]},
    "name": span("work", 0, 5, LOOP) | {"name": ["work"]},
    "a number": 7,
    "deep": "DEEP",
    "long": "x" * (3 << 20),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_an_event_that_makes_no_sense_is_left_out_and_counted(tmp_path, bad, capsys):
    path = write(tmp_path / "run.json", [*STORY[:6], bad, *STORY[6:]])
    if bad == "DEEP":
        text = (tmp_path / "run.json").read_text()
        (tmp_path / "run.json").write_text(text.replace('"DEEP"', "[" * 100_000))
    whole = trace.read(write(tmp_path / "good.json"))
    assert trace.numbers_of(trace.read(path)) == trace.numbers_of(whole)
    assert main.main(["report", path]) == 0
    assert "1 event could not be read and left out" in capsys.readouterr().out.splitlines()
    assert "1 event could not be read and left out" in (tmp_path / "run.html").read_text()


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "run.json")
    assert main.main(["report", str(tmp_path / "run.json")]) == 1
    assert "not a trace" in capsys.readouterr().err


def test_what_a_terminal_would_obey_is_escaped(tmp_path, capsys):
    printed = "\x1b[2J\x07 \ud800 \u202e"
    events = [
        *STORY,
        instant("bottleneck", S, text=printed),
        name_of(worker(2), f"worker 2 ({printed})"),
    ]
    path = write(tmp_path / "run\x1b[2J.json", events)
    assert main.main(["report", path]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert r"\x1b[2J\x07 \ud800 \u202e" in out
    page = (tmp_path / "run\x1b[2J.html").read_text()
    assert "\x1b" not in page
    check(page)


@pytest.mark.thorough
def test_a_large_trace_takes_little_memory(tmp_path):
    """As dicts its 60,000 events would take 60 MB."""
    events = [name_of(worker(0), "worker 0 (thread)"), instant("start", 0, **ABOUT)]
    for item in range(15_000):
        at = 100 * item
        events.append(span("next", at, at + 60, worker(0), shard=0, item=item))
        events.append(span("send", at + 60, at + 100, worker(0), shard=0, item=item))
        events.append(span("work", at, at + 90, LOOP, shard=0, item=item))
        events.append(instant("skipped", at, error="ValueError('x')", worker="worker 0"))
    path = write(tmp_path / "run.json", events)
    del events
    tracemalloc.start()
    try:
        recording = trace.read(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert recording.items == recording.counts["skipped"] == 15_000
    assert most < 2_000_000


def test_the_numbers_are_printed_as_json(tmp_path, capsys):
    path = write(tmp_path / "run.json", [*STORY, instant("bottleneck", 5 * S, text="Good.")])
    assert main.main(["report", path, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["items"], printed["seconds"], printed["errors"]) == (4, 5, 0)
    assert (printed["bottleneck"], printed["is_whole"], printed["left_out"]) == ("Good.", True, 0)
    assert printed["page"] == str(tmp_path / "run.html")
    check((tmp_path / "run.html").read_text())


def test_a_page_that_cannot_be_written_is_reported(tmp_path, capsys):
    path = write(tmp_path / "run.json")
    assert main.main(["report", path, "-o", str(tmp_path / "no" / "run.html")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err
    assert main.main(["report", path, "-o", str(tmp_path / ("n" * 300))]) == 1
    assert "cannot be written: File name too long" in capsys.readouterr().err


def test_the_command_can_be_called_by_any_thread(tmp_path, capsys):
    path, codes = write(tmp_path / "run.json"), []
    thread = threading.Thread(target=lambda: codes.append(main.main(["report", path])))
    thread.start()
    thread.join(LIMIT)
    assert codes == [0]


def test_help_has_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["report", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "examples:\n  enqueuer report run.json" in printed
    assert "exit codes: 0" in printed
