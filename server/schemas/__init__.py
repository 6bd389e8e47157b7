"""Bodies of requests and responses, as OpenAI's API has them."""
