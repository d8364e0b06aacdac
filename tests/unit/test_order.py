"""Order and position without a worker, against a model: a sorted list of what is to come."""

import dataclasses
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from enqueuer.order import CHANGES, Stage
from enqueuer.order.messages import Empty, Epoch, Failure, Item, Start, Ticket
from enqueuer.order.position import SavedPosition, load, save
from enqueuer.order.ranks import merge_states, of_rank
from enqueuer.order.sequence import ANY, Results, ShardOrder, TaskOrder

MOST = 8  # items of a shard, or tasks


class Rank:
    """One rank: what it has taken and not given, and how it takes."""

    def __init__(self, machine, epoch, rank, world_size):
        self.machine, self.rank, self.world_size = machine, rank, world_size
        self.ready = []

    @property
    def is_over(self):
        return self.order.is_over and not self.ready

    def state(self):
        """Return its state, by way of JSON."""
        epoch = self.order.next_epoch() if self.is_over else self.order.position(self.ready)
        machine = self.machine
        identity = {**machine.identity, "rank": self.rank, "world_size": self.world_size}
        return json.loads(json.dumps(save(SavedPosition(epoch), identity, {})))


class Machine(RuleBasedStateMachine):
    """Ranks that take and give items, stop, go on, and are merged and divided anew.

    `left` is the model: the items that no rank has given. A single rank gives them in their order,
    also one that goes on where several were that were in step.
    """

    of_rank = Rank
    # Whether the ranks together have given the first items, and no others.
    are_in_step = True

    def begin(self, identity, ordered, left):
        self.identity = {"random_seed": 7, "ordered": ordered, **identity}
        self.whole, self.left = sorted(left), sorted(left)
        self.ranks = [self.of_rank(self, Epoch(0), 0, 1)]

    def give(self, rank):
        item = rank.ready.pop(0)
        assert item[2] in self.left
        if self.identity["ordered"] and self.are_in_step and len(self.ranks) == 1:
            assert item[2] == self.left[0]
        self.left.remove(item[2])

    @rule(data=st.data(), takes=st.integers(1, 6), keeps=st.integers(0, 2))
    def read(self, data, takes, keeps):
        """Let a rank take items, and give them, but for some that stay ready."""
        rank = data.draw(st.sampled_from(self.ranks))
        for _ in range(takes):
            rank.take(lambda options: data.draw(st.sampled_from(options)))
        while len(rank.ready) > keeps:
            self.give(rank)

    @precondition(lambda self: not all(rank.is_over for rank in self.ranks))
    @rule(world_size=st.integers(0, 3))
    def stop_and_go_on(self, world_size):
        """Go on where it was, or with any number of ranks."""
        states = [rank.state() for rank in self.ranks]
        if world_size == 0 and not any(rank.is_over for rank in self.ranks):
            world_size, merged = len(states), states
        else:
            world_size = min(world_size or 1, self.identity.get("shards", MOST))
            merged = [merge_states(states)] * world_size
        first = len(self.whole) - len(self.left)
        self.are_in_step = self.are_in_step and self.left == self.whole[first:]
        self.ranks = []
        for rank, state in enumerate(merged):
            own = of_rank(state, rank, world_size, in_step=False)
            saved, changed = load(own, self.identity, {})
            assert changed == ""
            self.ranks.append(self.of_rank(self, saved.epoch, rank, world_size))

    @invariant()
    def all_that_is_ready_is_to_come(self):
        ready = [item[2] for rank in self.ranks for item in rank.ready]
        assert len(set(ready)) == len(ready)
        assert set(ready) <= set(self.left)

    def teardown(self):
        for rank in self.ranks:
            # Each takes an item, or notes an end.
            for _ in range(5 * MOST):
                rank.take(lambda options: options[0])
                while rank.ready:
                    self.give(rank)
            assert rank.is_over
        assert self.left == []


class ShardRank(Rank):
    """Each shard has items and, in their places, values of None."""

    def __init__(self, machine, epoch, rank, world_size):
        super().__init__(machine, epoch, rank, world_size)
        own = range(rank, len(machine.shards), world_size)
        self.order = ShardOrder(epoch, own, machine.identity["ordered"])

    def take(self, choose):
        order = self.order
        if order.is_over:
            return
        shard = order.turn()
        if shard is ANY:
            shard = choose(order.in_turn())
        made = self.machine.shards[shard]
        number = next((n for n in range(order.numbers[shard], len(made)) if made[n]), None)
        if number is None:
            order.ended(shard)
        else:
            self.ready.append(Item(shard, number, (sum(made[:number]), shard)))
            order.take(self.ready[-1:])


class ShardMachine(Machine):
    of_rank = ShardRank

    @initialize(
        shards=st.lists(st.lists(st.booleans(), max_size=MOST), min_size=1, max_size=4)
        | st.lists(st.just([True] * MOST), min_size=2, max_size=4),
        ordered=st.booleans(),
    )
    def begin_shards(self, shards, ordered):
        self.shards = shards
        left = [(turn, shard) for shard, made in enumerate(shards) for turn in range(sum(made))]
        self.begin({"kind": "GeneratorEnqueuer", "shards": len(shards)}, ordered, left)


class TaskRank(Rank):
    """Tickets go out, and their results come back in any order."""

    def __init__(self, machine, epoch, rank, world_size):
        super().__init__(machine, epoch, rank, world_size)
        begin, *others = epoch.division or (0,)
        places = [at for at in range(begin, machine.length) if at not in others]
        self.places = places[rank::world_size]
        self.first = 100 * epoch.number
        self.order = TaskOrder(epoch, self.first, machine.identity["ordered"])
        self.order.end_at(self.first + len(self.places))
        self.results = Results()
        numbers = range(self.first, self.order.end)
        todo = [number for number in numbers if not self.order.was_taken(number)]
        self.results.add([Ticket(number, 0, (number,)) for number in todo])

    def take(self, choose):
        order, results = self.order, self.results
        if undone := results.undone():
            number = choose(undone)
            place = self.places[number - order.first]
            if choose([True, False]):
                results.put(Failure(0, number, KeyError(), skipped=True))
            is_empty = place in self.machine.empty
            # A second result of a task is dropped.
            for value in (place, "again"):
                results.put(Empty(number) if is_empty else Item(0, number, value))
        if choose([True, False]):
            while isinstance(found := results.peek(order), Failure):
                results.pass_over(found)
            taken = results.take(order, choose([MOST, 1, 2]))
            assert found or not taken
            self.ready += taken


class TaskMachine(Machine):
    of_rank = TaskRank

    @initialize(length=st.integers(0, MOST), data=st.data(), ordered=st.booleans())
    def begin_tasks(self, length, data, ordered):
        self.length = length
        self.empty = data.draw(st.sets(st.integers(0, MOST - 1), max_size=2))
        left = [place for place in range(length) if place not in self.empty]
        self.begin({"kind": "OrderedEnqueuer", "length": length, "batch_size": None}, ordered, left)


TestShards = ShardMachine.TestCase
TestTasks = TaskMachine.TestCase
TestShards.settings = TestTasks.settings = settings(max_examples=100, stateful_step_count=20)


@given(data=st.data(), made=st.lists(st.booleans(), max_size=MOST), ordered=st.booleans())
def test_a_task_changes_its_stage_by_the_table(data, made, ordered):
    """A position tells what is of the rest, and how many were left out."""

    def begun(epoch):
        order = TaskOrder(epoch, 0, ordered)
        order.end_at(len(made))
        return order

    def change(number, event):
        stages[number] = CHANGES[stages[number], event]

    order, ready, stages = begun(Epoch(0)), [], dict.fromkeys(range(len(made)), Stage.PENDING)
    for _ in range(5 * MOST):
        rest = [number for number, stage in stages.items() if stage is Stage.PENDING]
        if not (may := ["take"] * bool(rest) + ["deliver", "stop"] * bool(ready)):
            break
        event = data.draw(st.sampled_from(may))
        if event == "take":
            number = rest[0] if ordered else data.draw(st.sampled_from(rest))
            assert order.turn() in (number, ANY)
            order.take(number, has_item=made[number])
            change(number, "take" if made[number] else "pass over")
            ready += [Item(0, number, None)] * made[number]
        elif event == "deliver":
            change(ready.pop(0).number, "deliver")
        else:
            order = begun(order.position(ready))
            for item in ready:
                change(item.number, "stop")
            ready = []
        position, left_out = order.position(ready), [*stages.values()].count(Stage.LEFT_OUT)
        begin, done = position.starts[0].number, position.done
        of_rest = {number for number in stages if number >= begin and number not in done}
        assert of_rest == {n for n, s in stages.items() if s in (Stage.PENDING, Stage.READY)}
        assert of_rest == {n for n in stages if not order.is_before(0, n, position)}
        assert position.left_out == left_out


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 4))
def test_a_workers_own_turns_are_those_of_the_whole(lengths, workers):
    """Then its channel holds the items in the order in which they are read."""

    def read(shards):
        order, left, seen = ShardOrder(Epoch(0), shards, True), list(lengths), []
        while not order.is_over:
            shard = order.turn()
            if left[shard]:
                left[shard] -= 1
                seen.append(shard)
                order.take([Item(shard, 0, None)])
            else:
                order.ended(shard)
        return seen

    whole = read(range(len(lengths)))
    for worker in range(workers):
        mine = range(worker, len(lengths), workers)
        assert read(mine) == [shard for shard in whole if shard in mine]


def test_the_state_of_the_last_item_given_away_is_the_one_that_is_known():
    order = ShardOrder(Epoch(0), [0], True, recent=4)
    for number in range(9):
        order.take([Item(0, number, None, f"after {number}")])
    ready = [Item(0, number, None) for number in (6, 7, 8)]
    assert order.position().starts == {0: Start(9, "after 8")}
    assert order.position(ready).starts == {0: Start(6, "after 5")}


def test_a_state_may_be_behind_its_position():
    """Some items tell no state: what stands for one that failed, say."""
    order = ShardOrder(Epoch(0, {0: Start(5, "after 3", 1)}), [0], True, recent=9)
    assert order.position().starts == {0: Start(5, "after 3", 1)}
    order.take([Item(0, 5, None, None)])
    assert order.position().starts == {0: Start(6, "after 3", 2)}
    order.take([Item(0, 6, None, "after 6")])
    assert order.position().starts == {0: Start(7, "after 6")}
    order.take([Item(0, 7, None, None)])
    assert order.position().starts == {0: Start(8, "after 6", 1)}
    ready = [Item(0, number, None) for number in (6, 7)]
    assert order.position(ready).starts == {0: Start(6, "after 3", 2)}


def test_what_comes_before_a_position_is_done():
    order = ShardOrder(Epoch(0), [0, 1], True)
    order.ended(1)
    order.take([Item(0, number, None) for number in (0, 1)])
    position = order.position([Item(0, 1, None)])
    places = [(0, 0), (0, 1), (1, 0)]
    assert [order.is_before(*place, position) for place in places] == [True, False, True]


@given(st.permutations(range(4)), st.integers(0, 9), st.integers(0, 9))
def test_what_is_ready_gets_its_turns_back(shards, takes, kept):
    """Also where turns do not go by index, as after a merge of ranks at different steps."""
    order = ShardOrder(Epoch(0, dict.fromkeys(shards, Start())), range(4), True)
    items = []
    for _ in range(takes):
        items.append(Item(order.turn(), order.numbers[order.turn()], None))
        order.take(items[-1:])
    ready = items[max(0, takes - kept) :]
    again = ShardOrder(order.position(ready), range(4), True)
    for item in ready:
        assert again.turn() == item.shard
        again.take([item])
    assert again.in_turn() == order.in_turn()


def test_open_shards_go_to_ranks_in_the_order_of_their_turns():
    state = {"kind": "GeneratorEnqueuer", "version": 1, "epoch": 0, "shards": 4, "ended": [3]}
    state |= {"rank": None, "world_size": None, "positions": [[2, 1], [0, 2], [1, 2]]}
    ranks = [of_rank(state, rank, 2, in_step=False) for rank in range(2)]
    assert [own["share"] for own in ranks] == [[2, 1, 3], [0]]


def test_merged_shards_go_on_with_the_one_whose_turn_it_is():
    for number in (0, 3):  # with as many items of None before it
        order = ShardOrder(Epoch(0), range(3), True)
        order.take([Item(0, number, None)])
        identity = {"kind": "GeneratorEnqueuer", "random_seed": 7, "shards": 3}
        identity |= {"rank": 0, "world_size": 1}
        merged = merge_states([save(SavedPosition(order.position()), identity, {})])
        assert merged["positions"] == [[1, 0], [2, 0], [0, number + 1]]


def test_before_the_first_state_a_shard_is_run_from_its_start():
    order = ShardOrder(Epoch(0), [0], True, recent=9)
    order.take([Item(0, 0, None, None)])
    order.take([Item(0, 1, None, "after 1")])
    assert order.position([Item(0, 1, None)]).starts == {0: Start(1)}
    assert order.position().starts == {0: Start(2, "after 1")}


def results_of(count, ordered=True):
    results = Results()
    results.tickets = {number: Ticket(number, 0, (number,)) for number in range(count)}
    order = TaskOrder(Epoch(0), 0, ordered)
    order.end_at(count)
    return results, order


def taken(results, order):
    return [item.number for item in results.take(order, 100)]


def test_results_of_the_next_epoch_wait_for_it():
    for ordered in (True, False):
        results, order = results_of(4, ordered)
        order.end_at(2)
        assert (results.waiting_before(2, 0), results.waiting_before(2, 1)) == (0, 1)
        for message in (Item(0, 2, "of the next one"), Item(0, 1, "x"), Failure(0, 3, OSError())):
            results.put(message)
        assert (results.waiting_before(2, 0), results.waiting_before(2, 5)) == (1, 2)
        results.put(Item(0, 0, "x"))
        assert sorted(taken(results, order)) == [0, 1]
        assert results.peek(order) is False
        assert order.is_over
        assert (order.place_of(1), order.place_of(3)) == ((0, 1), (1, 1))
        assert results.waiting_before(2, 5) == 0
        following = TaskOrder(Epoch(1), 2, ordered)
        assert taken(results, following) == [2]
        assert isinstance(results.peek(following), Failure)


def test_an_epoch_ends_with_an_empty_task_before_a_failure_of_the_next_one():
    for ordered in (True, False):
        results, order = results_of(3, ordered)
        order.end_at(2)
        for message in (Item(0, 0, "x"), Empty(1), Failure(0, 2, OSError())):
            results.put(message)
        assert taken(results, order) == [0]
        assert results.peek(order) is True
        assert order.is_over


def test_skipped_errors_come_once_each_and_before_the_result():
    results, order = results_of(2)
    first, second = (Failure(0, 0, KeyError(n), skipped=True) for n in (1, 2))
    for message in (first, second, Item(0, 0, "rest"), Item(0, 1, "next")):
        results.put(message)
    for nth, error in enumerate((first, second), start=1):
        numbered = dataclasses.replace(error, nth=nth)
        found = results.peek(order)
        assert found == results.peek(order) == numbered
        assert taken(results, order) == []
        results.pass_over(found)
        results.pass_over(found)
    assert results.peek(order) is True
    assert taken(results, order) == [0, 1]


def test_a_task_that_is_done_again_tells_its_errors_again_and_once():
    results, order = results_of(1)
    results.put(Failure(0, 0, KeyError(1), skipped=True))
    results.forget_skipped(0)
    again = Failure(0, 0, KeyError(1), skipped=True)
    for message in (again, Empty(0)):
        results.put(message)
    found = results.peek(order)
    assert found == dataclasses.replace(again, nth=1)
    results.pass_over(found)
    assert results.peek(order) is True
    assert order.is_over


def test_a_failure_waits_for_its_turn_and_stays():
    results, order = results_of(2)
    failure = Failure(0, 1, KeyError())
    results.put(failure)
    assert results.peek(order) is False
    results.put(Item(0, 0, "x"))
    assert taken(results, order) == [0]
    assert results.peek(order) == results.peek(order) == Failure(1, 1, failure.error, nth=1)


def test_an_error_is_known_by_the_index_of_its_element():
    results, order = results_of(1)
    results.tickets[0] = Ticket(0, 0, (40, 41, 42))
    error = KeyError()
    results.put(Failure(2, 0, error))
    assert results.peek(order) == Failure(42, 0, error, nth=1)
