"""Will a draft pay? Features, predictors, costs, policies."""
