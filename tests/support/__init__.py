"""What tests share: a scripted runner, a fake clock, a small tokenizer."""
