from torch.utils.data import DataLoader

from enqueuer import prefetch  # was: from prefetch_generator import ...


class DataLoaderX(DataLoader):
    def __iter__(self):
        return prefetch(super().__iter__())  # was: BackgroundGenerator(...)


loader = DataLoaderX(range(10), batch_size=4, num_workers=2)
for _ in range(2):
    for batch in loader:
        print(batch.tolist())
