"""What the CPU preset trains on: a tiny GLM-4.5-MoE with router biases, a character tokenizer and sums in GSM8K's format.

    python -m examples.grpo.cpu_preset FOLDER

FOLDER gets `model/` (Hugging Face checkpoint, random weights, with tokenizer and chat template), `sft.jsonl`, `train.jsonl`
and `eval.jsonl`. The questions are every sum, difference and product of two digits, 300 in all. A part of the worked
answers in `sft.jsonl` is wrong, as in text from the web: the supervised model knows the answers and does not stick to them,
which is what reinforcement learning then corrects.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedTokenizerFast

PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Of the copies of a question in sft.jsonl, the share whose worked answer is wrong.
WRONG = 0.5
COPIES = 64
EVAL = 64


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, the newline, the think tags and four special tokens."""
    tokens = [PAD, EOS, USER, ASSISTANT, "<think>", "</think>", "\n", *map(chr, range(32, 127))]
    made = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=EOS, chat_template=CHAT_TEMPLATE)
    wrapped.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT]})
    # Plain tokens, so that decoding keeps them: the reward has to see where a trace ends.
    wrapped.add_tokens(["<think>", "</think>"])
    return wrapped


def config() -> Glm4MoeConfig:
    """Three layers, the first dense; eight experts of which two take a token, and a shared one. Width 64."""
    return Glm4MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        partial_rotary_factor=0.5,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        use_qk_norm=False,
        attention_bias=True,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        num_nextn_predict_layers=0,
        architectures=["Glm4MoeForCausalLM"],
        dtype=torch.bfloat16,
        pad_token_id=0,
        eos_token_id=1,
    )


def save_model(folder: Path, seed: int) -> None:
    """Random bf16 weights; the router biases stay fp32, as they are in the released checkpoints."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config())
    for module in model.modules():
        if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
            module.e_score_correction_bias = torch.zeros(bias.shape, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def problems(generator: random.Random) -> list[dict[str, str]]:
    """All 300, shuffled, each with its worked answer."""
    kinds = (("+", int.__add__), ("-", int.__sub__), ("*", int.__mul__))
    found = [
        {"question": f"What is {a} {sign} {b}?", "answer": f"<think>{a}{sign}{b}={value}</think>\n#### {value}"}
        for a in range(10)
        for b in range(10)
        for sign, combine in kinds
        for value in [combine(a, b)]
    ]
    generator.shuffle(found)
    return found


def spoiled(problem: dict[str, str], generator: random.Random) -> dict[str, str]:
    """The problem, or with probability WRONG one with a value near the right one."""
    if generator.random() >= WRONG:
        return problem
    value = problem["answer"].rpartition(" ")[2]
    wrong = str(int(value) + generator.choice((-2, -1, 1, 2)))
    return {
        **problem,
        "answer": problem["answer"].replace(f"={value}<", f"={wrong}<").replace(f"# {value}", f"# {wrong}"),
    }


def save(folder: Path, seed: int = 0) -> None:
    """Write everything; the same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", seed)
    generator = random.Random(seed)
    train = problems(generator)
    sft = [spoiled(problem, generator) for _ in range(COPIES) for problem in train]
    for name, rows in (("sft", sft), ("train", train), ("eval", train[:EVAL])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    save(Path(sys.argv[1]))
