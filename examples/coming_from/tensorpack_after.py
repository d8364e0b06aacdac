import numpy as np

from enqueuer import OrderedEnqueuer

names = [f"{i}.png" for i in range(64)]


def load(name):
    return [np.zeros((32, 32, 3), np.uint8), int(name[:-4]) % 10]


with OrderedEnqueuer(
    names, load, shuffle=True, batch_size=16, drop_last=True, workers=2, backend="process"
) as df:
    for _ in range(2):
        for images, labels in df:
            print(images.shape, labels.shape)
