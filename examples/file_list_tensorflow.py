"""A text file of 'path label' lines, in TensorFlow: as a pipeline of tf.data, and by an enqueuer.

Both parse the lines, shuffle, load each file with a numpy function, make batches and repeat. In
tf.data, the function is a tf.numpy_function, so all calls share this process and its GIL. With the
enqueuer, worker processes call it, and TensorFlow gets finished batches.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    import tensorflow as tf

    from enqueuer.adapters.tensorflow import as_dataset
except ImportError as error:
    print(f"{error}. This needs TensorFlow: pip install tensorflow", file=sys.stderr)
    sys.exit(2)

from enqueuer import OrderedEnqueuer

EPOCHS, BATCH_SIZE, FILES = 3, 4, 18


def load(path):
    """Load and normalise an image, with numpy."""
    image = np.load(path).astype(np.float32)
    return (image - image.mean()) / (image.std() + 1e-6)


def pipeline(list_file):
    """Return the classic dataset of (image, label, path) batches."""

    def parse(line):
        path, label = tf.unstack(tf.strings.split(line, " "), 2)
        return path, tf.strings.to_number(label, tf.int32)

    def loaded(path, label):
        image = tf.numpy_function(lambda path: load(path.decode()), [path], tf.float32)
        return tf.ensure_shape(image, (8, 8)), label, path

    return (
        tf.data.TextLineDataset(str(list_file))
        .map(parse)
        .shuffle(FILES, seed=7)
        .map(loaded, num_parallel_calls=2)
        .batch(BATCH_SIZE)
        .repeat(EPOCHS)
    )


def row(line):
    """Do the same for one line, in a worker."""
    path, label = line.split()
    return load(path), np.int32(label), path


def enqueued(list_file):
    """Return a dataset of the same batches, made by two worker processes."""
    lines = list_file.read_text().splitlines()
    enqueuer = OrderedEnqueuer(
        lines,
        map=row,
        shuffle=True,
        batch_size=BATCH_SIZE,
        workers=2,
        backend="process",
        random_seed=7,
    )
    return as_dataset(enqueuer).repeat(EPOCHS)


def train(dataset):
    """Train a small model; return its losses, and how often it has seen each file."""
    dense = tf.Variable(tf.zeros((64, 2)))
    losses, seen = [], {}
    for images, labels, paths in dataset:
        with tf.GradientTape() as tape:
            logits = tf.reshape(images, (-1, 64)) @ dense
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        dense.assign_sub(0.1 * tape.gradient(loss, dense))
        losses.append(float(loss))
        for path in paths.numpy():
            seen[path.decode()] = seen.get(path.decode(), 0) + 1
    return losses, seen


with tempfile.TemporaryDirectory() as directory:
    rng = np.random.default_rng(7)
    entries = {}
    # An image is bright at the left, or at the top.
    for i in range(FILES):
        image = rng.random((8, 8)) + np.linspace(2, 0, 8)
        path = Path(directory, f"{i:02}.npy")
        np.save(path, image if i % 2 else image.T)
        entries[str(path)] = i % 2
    list_file = Path(directory, "train.txt")
    list_file.write_text("".join(f"{path} {label}\n" for path, label in entries.items()))

    for make in (pipeline, enqueued):
        losses, seen = train(make(list_file))
        # Each file came once in each epoch.
        assert seen == dict.fromkeys(entries, EPOCHS)
        assert losses[-1] < losses[0] / 2
        print(f"{make.__name__}: {len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
