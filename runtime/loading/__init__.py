"""Where do a model's weights come from: safetensors, GGUF, or a generator of random numbers?"""
