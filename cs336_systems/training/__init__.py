"""Training a byte-level language model: corpus, wrappers by name, the loop, the folder of a run."""

from cs336_systems.training.corpus import Corpus
from cs336_systems.training.hyperparameters import TrainingConfig, learning_rate
from cs336_systems.training.loop import TrainingResult, train

__all__ = ["Corpus", "TrainingConfig", "TrainingResult", "learning_rate", "train"]
