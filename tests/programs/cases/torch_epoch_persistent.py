"""`set_epoch()` reaches the dataset, in this process, in new workers and in persistent ones."""

# needs: torch

import random

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from enqueuer.adapters.torch import DataLoader


class Rows(Dataset):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.epoch, i


class Stream(Rows, IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        i, n = (info.id, info.num_workers) if info else (0, 1)
        order = list(range(8))
        random.Random(self.epoch).shuffle(order)
        yield from ((self.epoch, x) for x in order[i::n])


def main():
    for kind in (Rows, Stream):
        for workers, persistent in ((0, False), (2, False), (2, True)):
            options = {"num_workers": workers, "persistent_workers": persistent}
            loader = DataLoader(kind(), batch_size=4, **options)
            for epoch in range(3):
                loader.set_epoch(epoch)
                found = {e for batch in loader for e in batch[0].tolist()}
                assert found == {epoch}, (kind, options, epoch, found)
    print("ok")


if __name__ == "__main__":
    main()
