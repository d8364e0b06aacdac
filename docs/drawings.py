"""Draw the pictures of the pages anew: run this file.

Boxes stand on a grid; an arrow joins two boxes, with words above it or beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from svg import element, in_dark, text

from enqueuer.order import CHANGES, Stage

HERE = Path(__file__).parent
# The distance of lines, and the space around the words of a box, in pixels.
LINE, PAD = 17, 9
INK, BOX, WORKER, PAPER = "#222", "#eef3fa", "#fdf3e1", "#fff"


@dataclass
class Box:
    """Lines of words in a rectangle; the first line is bold."""

    x: int
    y: int
    width: int
    lines: tuple[str, ...]
    fill: str = BOX

    @property
    def height(self) -> int:
        return LINE * len(self.lines) + 2 * PAD

    def draw(self) -> list[str]:
        shape = element(
            "rect",
            x=self.x,
            y=self.y,
            width=self.width,
            height=self.height,
            rx=5,
            fill=self.fill,
            stroke=INK,
        )
        return [
            shape,
            *(
                text(
                    self.x + PAD,
                    self.y + PAD + LINE * (i + 1) - 5,
                    line,
                    font_weight="normal" if i else "bold",
                )
                for i, line in enumerate(self.lines)
            ),
        ]


@dataclass
class Drawing:
    """Boxes, arrows between them, and words."""

    title: str
    width: int
    height: int
    shapes: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, *lines: str, fill: str = BOX) -> Box:
        box = Box(x, y, width, lines, fill)
        self.shapes += box.draw()
        return box

    def words(self, x: float, y: float, words: str, anchor: str = "start") -> None:
        self.shapes.append(text(x, y, words, anchor, font_style="italic"))

    def across(self, start: Box, end: Box, *words: str, lower: int = 0) -> None:
        """Draw an arrow between boxes that stand side by side, with words above it.

        Args:
            start: Where it begins.
            end: Where it ends.
            words: Lines of words.
            lower: By how much it is lower than the middle of the boxes; the words are below it.
        """
        y = start.y + min(start.height, end.height) / 2 + lower
        if start.x < end.x:
            x, to = start.x + start.width, end.x
        else:
            x, to = start.x, end.x + end.width
        self._arrow(x, y, to, y)
        for i, line in enumerate(reversed(words)):
            at = y + LINE * (i + 1) if lower else y - 6 - LINE * i
            self.words((x + to) / 2, at, line, "middle")

    def down(self, start: Box, end: Box, *words: str) -> None:
        """Draw an arrow between boxes that stand one above the other, with words beside it."""
        left, right = max(start.x, end.x), min(start.x + start.width, end.x + end.width)
        x = (left + right) / 2
        if start.y < end.y:
            y, to = start.y + start.height, end.y
        else:
            y, to = start.y, end.y + end.height
        self._arrow(x, y, x, to)
        middle = (y + to) / 2 + 4 - LINE * (len(words) - 1) / 2
        for i, line in enumerate(words):
            self.words(x + 10, middle + LINE * i, line)

    def border(self, y: float, words: str) -> None:
        """Draw the border between processes."""
        self.shapes.append(
            element("line", x1=0, y1=y, x2=self.width, y2=y, stroke="#999", stroke_dasharray="6 5")
        )
        self.words(10, y - 6, words)

    def write(self, path: Path) -> None:
        picture = element(
            "svg",
            "\n".join(
                [
                    "",
                    element("title", self.title),
                    element("rect", width=self.width, height=self.height, fill=PAPER),
                    *self.shapes,
                    "",
                ]
            ),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {self.width} {self.height}",
            width=self.width,
            height=self.height,
            role="img",
            font_family="system-ui, sans-serif",
            font_size=12,
            fill=INK,
        )
        path.write_text(f"{picture}\n")

    def _arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        across, down = _sign(to_x - x), _sign(to_y - y)
        back_x, back_y = to_x - 8 * across, to_y - 8 * down
        head = (
            f"M{to_x} {to_y} L{back_x + 4 * down} {back_y + 4 * across} "
            f"L{back_x - 4 * down} {back_y - 4 * across} Z"
        )
        self.shapes += [
            element("line", x1=x, y1=y, x2=back_x, y2=back_y, stroke=INK),
            element("path", d=head, fill=INK),
        ]


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def path_of_a_batch() -> Drawing:
    drawing = Drawing("The path of a batch from a worker to the loop", 760, 330)
    drawing.words(10, 22, "A worker: a thread, a process or a Ray actor")
    source = drawing.box(10, 34, 170, "workers/sources", "open(shard)", fill=WORKER)
    loop = drawing.box(260, 34, 150, "workers/loop", "turns()", fill=WORKER)
    sender = drawing.box(
        490,
        34,
        260,
        "A sender",
        "thread_channel,",
        "transport/sender or ray/actor",
        fill=WORKER,
    )
    drawing.across(source, loop, "next()")
    drawing.across(loop, sender, "Item")
    drawing.border(190, "Process boundary: packets, shared memory, Ray's store")
    engine = drawing.box(
        490,
        220,
        260,
        "backends/engine",
        "A schedule: which item is next",
        "A pool: the workers' inboxes, sleep()",
    )
    reader = drawing.box(235, 220, 190, "enqueuers/epoch_reader", "ready: a deque of items")
    user = drawing.box(10, 220, 140, "Your loop", "next()")
    drawing.down(sender, engine, "Item")
    drawing.across(engine, reader, "Item")
    drawing.across(reader, user, "batch")
    drawing.words(10, 315, "Your process")
    return drawing


def path_of_a_task() -> Drawing:
    drawing = Drawing("The path of a task from the loop to a worker and back", 760, 345)
    drawing.words(10, 22, "Your process")
    drawing.words(540, 22, "A worker")
    epoch = drawing.box(
        10,
        34,
        190,
        "enqueuers/tasks",
        "indices of elements,",
        "or elements",
    )
    queue = drawing.box(280, 34, 170, "A queue", "thread_channel or", "transport/channel")
    worker = drawing.box(
        540,
        34,
        210,
        "workers/task_loop",
        "workers/tasks:",
        "element -> map -> collate",
        fill=WORKER,
    )
    drawing.across(epoch, queue, "Ticket", "submit()")
    drawing.across(queue, worker, "next_", "ticket()")
    order = drawing.box(540, 230, 210, "order/sequence", "The results in order")
    reader = drawing.box(270, 230, 190, "enqueuers/epoch_reader", "ready: a deque of items")
    user = drawing.box(10, 230, 140, "Your loop", "next()")
    drawing.border(195, "Process boundary")
    drawing.down(worker, order, "Item")
    drawing.across(order, reader, "Item")
    drawing.across(reader, user, "batch")
    drawing.words(10, 330, "Your process")
    return drawing


def parts_of_the_engine() -> Drawing:
    drawing = Drawing("The engine between enqueuers, schedules and pools", 760, 225)
    enqueuers = drawing.box(10, 20, 130, "enqueuers")
    engine = drawing.box(290, 20, 130, "engine")
    schedule = drawing.box(570, 20, 180, "shard_schedule", "or task_schedule")
    pool = drawing.box(
        290,
        150,
        460,
        "A pool of threads, processes or Ray actors",
        "The handle and the inbox of each worker",
    )
    drawing.across(enqueuers, engine, "wait()")
    drawing.across(engine, schedule, "next_step()")
    drawing.down(engine, pool, "start_worker(), sleep(), stop()")
    drawing.down(schedule, pool, "head()")
    return drawing


def stages_of_an_item() -> Drawing:
    """Draw the table of `enqueuer.order`."""
    drawing = Drawing("The stages of an item, or of a task, on its way to the loop", 760, 190)
    grid = {
        Stage.PENDING: (10, 20, 180),
        Stage.READY: (260, 20, 185),
        Stage.DELIVERED: (515, 20, 235),
        Stage.LEFT_OUT: (10, 125, 240),
    }
    boxes = {stage: drawing.box(*place, stage.name, stage.value) for stage, place in grid.items()}
    for (stage, event), new in CHANGES.items():
        start, end = boxes[stage], boxes[new]
        if start.y != end.y:
            drawing.down(start, end, event)
        else:
            # The way back is below the way there.
            drawing.across(start, end, event, lower=14 if end.x < start.x else 0)
    return drawing


def from_enqueuer_to_framework() -> Drawing:
    drawing = Drawing("From the enqueuer through an adapter to the loop", 760, 115)
    enqueuers = drawing.box(10, 20, 120, "enqueuers", "next()")
    adapters = drawing.box(
        220, 20, 250, "adapters", "Loader: converts batches", "PrefetchReader: in a thread"
    )
    user = drawing.box(640, 20, 110, "Your loop", "next()")
    drawing.across(enqueuers, adapters, "batch")
    drawing.across(adapters, user, "tensors,", "JAX arrays …")
    return drawing


def path_from_an_actor() -> Drawing:
    drawing = Drawing("The path of an item from a Ray actor to the loop", 760, 215)
    drawing.words(10, 22, "The actor, on any node")
    drawing.words(430, 22, "The driver")
    worker = drawing.box(10, 34, 80, "Worker", "a thread", fill=WORKER)
    outbox = drawing.box(165, 34, 80, "Outbox", " ", fill=WORKER)
    stream = drawing.box(315, 34, 90, "packets()", "a thread", fill=WORKER)
    receiver = drawing.box(480, 34, 95, "Receiver", "a thread")
    inbox = drawing.box(660, 34, 90, "Inbox", " ")
    loop = drawing.box(660, 150, 90, "Your loop", "take()")
    control = drawing.box(165, 150, 310, "assign(), grant()", "Epochs, tickets and credit")
    drawing.across(worker, outbox, "encode")
    drawing.across(outbox, stream, "take all")
    drawing.across(stream, receiver, "packet")
    drawing.across(receiver, inbox, "unpack")
    drawing.down(inbox, loop, "item")
    drawing.across(loop, control, "acknowledge()")
    drawing.down(control, outbox)
    return drawing


def the_model() -> Drawing:
    """Draw what README.md and the page of the classes explain; a phone shows its whole width."""
    drawing = Drawing("Shards, workers, the queue and the loop", 340, 320)
    drawing.words(6, 14, "Your work, divided into shards")
    shards = [
        drawing.box(6 + 84 * place, 22, 76, f"shard {i}") for place, i in enumerate((0, 2, 1, 3))
    ]
    workers = [
        drawing.box(6 + 168 * i, 90, 160, f"worker {i}", "runs your generator", fill=WORKER)
        for i in range(2)
    ]
    queue = drawing.box(6, 175, 328, "queue", "max_queue_size finished batches, in order")
    user = drawing.box(6, 260, 328, "your loop", "for batch in enqueuer: train(batch)")
    for i, shard in enumerate(shards):
        drawing.down(shard, workers[i // 2])
    for worker in workers:
        drawing.down(worker, queue)
    drawing.down(queue, user)
    return drawing


# What a reader has, and the class for it; each box has two lines.
CLASSES = (
    (("An iterator,", "or another loader"), ("prefetch", "one line")),
    (("A generator function", "that yields batches"), ("GeneratorEnqueuer", "many workers")),
    (("A list, and a function", "of its elements"), ("OrderedEnqueuer", "batches, shuffles")),
    (("A torch Dataset,", "code with DataLoader"), ("DataLoader", "one changed import")),
    (("An enqueuer,", "a loop in PyTorch"), ("TorchLoader", "makes tensors")),
)


def which_class() -> Drawing:
    step = 2 * LINE + 2 * PAD + 12
    drawing = Drawing("What you have, and what you take", 340, 24 + step * len(CLASSES))
    drawing.words(6, 14, "You have")
    drawing.words(186, 14, "You take")
    for i, (have, take) in enumerate(CLASSES):
        y = 24 + step * i
        start = drawing.box(6, y, 156, *have)
        drawing.across(start, drawing.box(186, y, 152, *take, fill=WORKER))
    return drawing


# Milliseconds in which the workers of the picture make a batch, and its loop uses one; batches.
_MAKING_MS, _USING_MS, _BATCHES = 94, 25, 192
# Seconds that the picture shows each of its loops, one frame a second.
_SHOWN_S = 5
_MONOSPACE = "ui-monospace, Menlo, Consolas, monospace"


def progress_bar() -> Drawing:
    """Draw the progress bar of two loops: the first one follows the advice that the bar gives."""
    drawing = Drawing(
        "The progress bar names what the loop waits for, and what to change", 560, 118
    )
    drawing.shapes.append(
        element("rect", x=0, y=0, width=560, height=118, rx=6, fill=BOX, stroke="#999")
    )
    frames = [(workers, second) for workers in (2, 4) for second in range(1, _SHOWN_S + 1)]
    for at, (workers, second) in enumerate(frames):
        drawing.shapes.append(_frame(workers, second, at, len(frames)))
    return drawing


def _frame(workers: int, second: int, at: int, count: int) -> str:
    """Return what is shown in one second of the picture."""
    batch_ms = max(_MAKING_MS / workers, _USING_MS)
    done = min(_BATCHES, round(1000 * second / batch_ms))
    seconds, left = round(done * batch_ms / 1000), round((_BATCHES - done) * batch_ms / 1000)
    waiting = round(100 * (1 - _USING_MS / batch_ms))
    cause = "source: workers=4" if waiting else "loop"
    queue, busy = (0, "100 100") if waiting else (9, "94 95 93 94")
    lines = (
        f"loader = OrderedEnqueuer(paths, load, workers={workers}, progress=True)",
        "for batch in loader: train(batch)",
    )
    shapes = [text(12, 22 + LINE * i, line, fill="#767676") for i, line in enumerate(lines)]
    share = done / _BATCHES
    shapes += [
        text(12, 70, f"epoch 0: {100 * share:3.0f}%"),
        element("rect", x=112, y=60, width=140, height=12, fill="#ddd"),
        element("rect", x=112, y=60, width=140 * share, height=12, fill=INK),
        text(
            262,
            70,
            f"{done}/{_BATCHES} [00:{seconds:02}<00:{left:02}, {1000 / batch_ms:.1f}batch/s,",
        ),
        text(
            12,
            70 + LINE,
            f"waiting {waiting} % ({cause}),",
            font_weight="bold",
            fill="#d55e00" if waiting else "#0072b2",
        ),
        text(
            12,
            70 + 2 * LINE,
            f"queue {queue}/10, {workers} workers busy {busy} %]",
        ),
    ]
    # What does not move shows the frame with the advice.
    is_still = at == _SHOWN_S - 1
    times = [at / count, (at + 1) / count]
    shapes.append(
        element(
            "animate",
            attributeName="opacity",
            calcMode="discrete",
            values="0;1;0" if at else "1;0",
            keyTimes=";".join(f"{time:g}" for time in ([0.0, *times] if at else times)),
            dur=f"{count}s",
            repeatCount="indefinite",
        )
    )
    return element("g", "\n".join(["", *shapes, ""]), opacity=int(is_still), font_family=_MONOSPACE)


def badge(label: str, value: str) -> Drawing:
    """Draw a label and its value, side by side."""
    widths = [6 * len(words) + 14 for words in (label, value)]
    drawing = Drawing(f"{label}: {value}", sum(widths), 20)
    x = 0
    for words, width, fill in zip((label, value), widths, ("#767676", "#0072b2"), strict=True):
        drawing.shapes += [
            element("rect", x=x, y=0, width=width, height=20, fill=fill),
            text(x + width // 2, 14, words, "middle", fill=PAPER, font_size=11),
        ]
        x += width
    return drawing


def _metadata(key: str) -> list[str]:
    """Return the values of a key, or the ends of the lines that begin with it, of setup.cfg."""
    lines = (HERE.parent / "setup.cfg").read_text(encoding="utf-8").splitlines()
    return [line.partition(key)[2].strip() for line in lines if line.strip().startswith(key)]


def badge_of_pythons() -> Drawing:
    versions = _metadata("Programming Language :: Python :: 3.")
    return badge("Python", f"3.{versions[0]} to 3.{versions[-1]}")


DRAWINGS = {
    "progress": progress_bar,
    "badge-tests": functools.partial(badge, "tests", "threads, processes, Ray"),
    "badge-python": badge_of_pythons,
    "badge-license": lambda: badge("license", _metadata("license_expression = ")[0]),
    "model": the_model,
    "which_class": which_class,
    "path_of_a_batch": path_of_a_batch,
    "path_of_a_task": path_of_a_task,
    "engine": parts_of_the_engine,
    "stages": stages_of_an_item,
    "adapters": from_enqueuer_to_framework,
    "path_from_an_actor": path_from_an_actor,
}


def main() -> None:
    (HERE / "drawings").mkdir(exist_ok=True)
    for name, drawing in DRAWINGS.items():
        drawing().write(HERE / "drawings" / f"{name}.svg")
    # README.md is not built by Sphinx, which makes the dark pictures of the pages.
    for name in ("model", "progress"):
        light = HERE / "drawings" / f"{name}.svg"
        light.with_stem(f"{name}-dark").write_text(in_dark(light.read_text()))


if __name__ == "__main__":
    main()
