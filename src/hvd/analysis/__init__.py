"""Would it help me? Replays recorded answers of logs, without a model."""
