"""Quantized sources to BCQ and back: conversion, its tasks, restoring, verifying."""
