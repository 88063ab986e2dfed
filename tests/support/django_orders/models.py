"""Orders, in their own table."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order. No unique index prevents a double effect."""

    class Status(models.TextChoices):
        PAID = "PAID"
        SHIPPING = "SHIPPING"
        SHIPPED = "SHIPPED"

    status = models.CharField(max_length=10, choices=Status.choices, default=Status.PAID)
    fence_token = models.BigIntegerField(null=True)


class Effect(models.Model):
    """An effect of a body."""

    item = models.TextField()


class Parcel(models.Model):
    """With ids of several kinds."""

    id = models.UUIDField(primary_key=True)
    tenant = models.CharField(max_length=20)
    number = models.IntegerField()
    state = models.SmallIntegerField(default=0)
    fence = models.BigIntegerField(null=True)
    made = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["tenant", "number"], name="parcel_number"),)
