package main

import (
	"maps"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/refill-go/refill/bench/peers"
)

// machine returns the properties of this machine and its software that the figures depend on. A property that cannot be
// found out is missing.
func machine() map[string]string {
	m := map[string]string{
		"go":    runtime.Version(),
		"os":    runtime.GOOS + "/" + runtime.GOARCH,
		"cores": strconv.Itoa(runtime.NumCPU()),
		"redis": redisVersion(),
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		m["load"] = strings.Join(strings.Fields(string(load))[:3], " ")
	}
	cpu, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(cpu)) {
		if name, model, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			m["cpu"] = strings.TrimSpace(model)
			break
		}
	}
	maps.Copy(m, versions())
	maps.DeleteFunc(m, func(_, v string) bool { return v == "" })
	return m
}

// redisVersion returns "7.0.15" if the server prints "Redis server v=7.0.15 sha=…".
func redisVersion() string {
	text, err := exec.Command("redis-server", "--version").Output()
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(text), "v=")
	version, _, _ := strings.Cut(after, " ")
	return version
}

// versions returns the versions of the measured modules.
func versions() map[string]string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	built := map[string]string{}
	for _, m := range info.Deps {
		built[m.Path] = m.Version
	}
	v := map[string]string{}
	for _, p := range peers.All() {
		v[p.Module] = built[p.Module]
	}
	delete(v, "github.com/refill-go/refill") // this repository has no version
	return v
}
