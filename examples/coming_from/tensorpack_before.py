import numpy as np
from tensorpack.dataflow import BatchData, DataFromList, MapData, PrefetchDataZMQ

names = [f"{i}.png" for i in range(64)]


def load(name):
    return [np.zeros((32, 32, 3), np.uint8), int(name[:-4]) % 10]


df = MapData(DataFromList(names, shuffle=True), load)
df = PrefetchDataZMQ(BatchData(df, 16), num_proc=2)
df.reset_state()
for _ in range(2):
    for images, labels in df:
        print(images.shape, labels.shape)
del df  # stops its processes
