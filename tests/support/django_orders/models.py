"""Orders, in their own table."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """Without a unique index on what a double effect would write."""

    class Status(models.TextChoices):
        PAID = "PAID"
        SHIPPING = "SHIPPING"
        SHIPPED = "SHIPPED"

    status = models.CharField(max_length=10, choices=Status.choices, default=Status.PAID)
    fence_token = models.BigIntegerField(null=True)


class Effect(models.Model):
    """What a body wrote."""

    item = models.TextField()
