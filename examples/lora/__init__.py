"""What `examples.convert_lora` is made of: a Megatron LoRA checkpoint in, a PEFT adapter folder out."""
