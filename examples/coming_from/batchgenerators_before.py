import numpy as np
from batchgenerators.dataloading.data_loader import DataLoader
from batchgenerators.dataloading.multi_threaded_augmenter import MultiThreadedAugmenter


class Patches(DataLoader):
    def __init__(self, data, batch_size, num_threads):
        super().__init__(data, batch_size, num_threads, seed_for_shuffle=7)
        self.indices = list(range(len(data)))

    def generate_train_batch(self):
        return {"data": self._data[self.get_indices()]}


def noise(data):
    return {"data": data + np.random.normal(0, 0.1, data.shape)}


patches = np.zeros((32, 1, 8, 8))
augmenter = MultiThreadedAugmenter(Patches(patches, 4, 2), noise, num_processes=2, seeds=[1, 2])
for _ in range(2):
    for batch in augmenter:
        print(batch["data"].shape)
