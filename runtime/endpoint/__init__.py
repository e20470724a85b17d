"""What does a scenario come to on somebody else's server, and what did other tools measure there?

Any server that speaks OpenAI's protocol: vLLM, SGLang, TensorRT-LLM, llama.cpp. Nothing here needs torch.
"""
