"""Campaigns: many small jobs, each with a fault of its own, to see whether guards keep their promises."""

from stretto_lab.campaign.campaign import RESULTS, CampaignConfig, repeat_fault, run_campaign, small
from stretto_lab.campaign.judgement import Judgement

__all__ = ["RESULTS", "CampaignConfig", "Judgement", "repeat_fault", "run_campaign", "small"]
