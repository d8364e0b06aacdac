"""Another batch size in the middle of training, by the batch sampler; not by an attribute."""

# needs: torch

from enqueuer import OrderedEnqueuer
from enqueuer.adapters.torch import DataLoader


def refuses(owner, name, value, kind):
    try:
        setattr(owner, name, value)
    except kind:
        return True
    return False


def main():
    for workers, persistent in ((0, False), (2, False), (2, True)):
        loader = DataLoader(
            range(12), batch_size=2, num_workers=workers, persistent_workers=persistent
        )
        assert [len(batch) for batch in loader] == [2] * 6
        loader.batch_sampler.batch_size = 5
        assert [len(batch) for batch in loader] == [5, 5, 2]
        assert len(loader) == 3
        for name in ("batch_size", "dataset", "sampler", "drop_last"):
            assert refuses(loader, name, None, ValueError), name
    with OrderedEnqueuer(range(12), batch_size=2, workers=2) as enqueuer:
        assert [len(batch) for batch in enqueuer] == [2] * 6
        assert refuses(enqueuer, "batch_size", 5, AttributeError)
    print("ok")


if __name__ == "__main__":
    main()
