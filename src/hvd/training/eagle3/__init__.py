"""Training of EAGLE3 heads: text, hidden states, the fit, the finished head. `train.py` puts them together."""
