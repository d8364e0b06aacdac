"""argman/EAST, icdar.py: its module data_util, a copy of Keras' GeneratorEnqueuer, is enqueuer."""

import sys

import enqueuer

sys.modules["data_util"] = enqueuer
