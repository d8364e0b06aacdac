"""`__getitems__` that makes whole batches: as with torch, or an error that says what to give."""

# needs: torch

import torch
from torch.utils.data import Dataset

from enqueuer import OrderedEnqueuer
from enqueuer.adapters.torch import DataLoader


class Store(Dataset):
    x = torch.arange(20)

    def __len__(self):
        return 20

    def __getitem__(self, i):
        raise NotImplementedError("read many at once")

    def __getitems__(self, indices):
        rows = torch.tensor(list(indices))
        return {"x": self.x[rows], "twice": 2 * self.x[rows]}


def identity(batch):
    return batch


def main():
    indices = [list(range(i, min(i + 6, 20))) for i in range(0, 20, 6)]
    for workers in (0, 2):
        loader = DataLoader(Store(), batch_size=6, collate_fn=identity, num_workers=workers)
        assert [batch["x"].tolist() for batch in loader] == indices
    for backend in ("thread", "process"):
        said = ""
        try:
            with OrderedEnqueuer(Store(), batch_size=6, collate=identity, backend=backend) as each:
                list(each)
        except TypeError as error:
            said = str(error)
        assert "must return a list" in said, said
        # As the error says.
        with OrderedEnqueuer(indices, map=Store().__getitems__, backend=backend) as each:
            assert [batch["x"].tolist() for batch in each] == indices
    print("ok")


if __name__ == "__main__":
    main()
