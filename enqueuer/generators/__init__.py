"""What an enqueuer does with the samples of a generator: shuffling, batching, mixing."""
