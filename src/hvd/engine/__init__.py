"""The engine and the public class `LLM`."""
