"""What a draft is and how it is verified: models, caches, contrastive targets, drafters and the decoding loop."""
