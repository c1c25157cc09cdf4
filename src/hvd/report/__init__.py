"""Pages for people: self-contained HTML, readable on a phone and in the dark. Computes nothing that isn't there."""
