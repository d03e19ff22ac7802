"""Campaigns: many jobs, each with a fault of its own, and what guards have made of them."""

from stretto.campaign.campaign import RESULTS, CampaignConfig, repeat_fault, run_campaign
from stretto.campaign.judgement import Judged
from stretto.campaign.trial import small

__all__ = ["RESULTS", "CampaignConfig", "Judged", "repeat_fault", "run_campaign", "small"]
