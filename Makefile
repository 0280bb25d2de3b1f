# make test | lint | bench | fuzz | model | torture | services; `make` alone says what each does.
# Plain make and sh. The modules are those of go.work.

MODULE = github.com/refill-go/refill

# golangci-lint is built once, outside of the tree. v2.12 is the newest that builds with Go 1.25.
LINT_VERSION = v2.12.2
CACHE        = $${REFILL_CACHE:-$${XDG_CACHE_HOME:-$${HOME:-/tmp}/.cache}/refill}

SUITE     = l1,heap,l2,again,wait
FUZZTIME  = 10s

.PHONY: help test servers lint bench fuzz services model torture

help:
	@echo 'make test      run the tests of every module, with the race detector and real servers'
	@echo 'make lint      run golangci-lint $(LINT_VERSION) in every module'
	@echo 'make bench     measure refill beside its peers, on an idle machine  (SUITE=$(SUITE); go run ./bench -h)'
	@echo 'make fuzz      run each fuzz test shortly  (FUZZTIME=10s)'
	@echo 'make model     check the model of the protocol with spin'
	@echo 'make torture   test each promise at length, and break it (some 20 minutes; REFILL_TORTURE_FOR=5m)'
	@echo 'make services  start a Redis to play with, and say how to stop it'

# One go test for all modules of go.work (their paths all begin alike), so that its own lines are the last ones.
test: servers
	go test -race -shuffle=on -count=1 $(MODULE)/...

# Installs what tests start, where it can: with apt-get and root or sudo. What cannot be installed is said, and the tests that
# need it are skipped, unless REFILL_NO_SKIP=1 makes them fail.
servers:
	@$(call install,redis-server,redis-server,the tests that need a real Redis will be skipped)
	@$(call install,gcc,gcc libc6-dev,the tests that set the clock of a Redis will be skipped)

# install: the program, its packages, what is missed without it.
install = if command -v $(1) >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ]; then as_root=; \
	elif sudo -n true 2>/dev/null; then as_root='sudo -n'; \
	else as_root=none; fi; \
	if [ "$$as_root" != none ] && command -v apt-get >/dev/null; then \
		echo '$(1) is not installed: installing it with apt-get'; \
		apt="$$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120"; \
		{ $$apt update && $$apt install -y --no-install-recommends $(2); } </dev/null >&2 || true; \
	fi; \
	if ! command -v $(1) >/dev/null; then \
		echo '$(1) is not installed and cannot be installed from here (that takes apt-get and root or sudo):'; \
		echo '$(3).'; \
	fi

# The protocol as a Promela model, checked by spin.
model:
	@$(call install,gcc,gcc libc6-dev,the model will not be checked)
	@$(call install,spin,spin,the model will not be checked)
	docs/model/check.sh

# Every promise, its tests at length, and a break of the code for each that its test has to find: the table of
# docs/guarantees.md. REFILL_TORTURE_FOR is how long the histories run.
torture: servers
	go run ./internal/realtest/torture -breaks -write

lint:
	@bin="$(CACHE)/golangci-lint-$(LINT_VERSION)-$$(go env GOVERSION)"; \
	if [ ! -x "$$bin/golangci-lint" ]; then \
		echo 'building golangci-lint $(LINT_VERSION), once (a minute or two)'; \
		GOBIN="$$bin" GOFLAGS= go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION) || exit 1; \
	fi; \
	go list -m -f '{{.Dir}}' | { status=0; while IFS= read -r dir; do \
		echo "golangci-lint run  $$dir"; \
		(cd "$$dir" && "$$bin/golangci-lint" run ./... </dev/null) || status=1; \
	done; exit $$status; }

bench: servers
	go run ./bench -suite '$(SUITE)'

# go test -fuzz takes one fuzz test of one package at a time.
fuzz:
	@go list -f '{{.Dir}}' $(MODULE)/... | while IFS= read -r dir; do \
		cat "$$dir"/*_test.go 2>/dev/null | sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' | while read -r name; do \
			echo "$$name in $$dir"; \
			(cd "$$dir" && go test -run '^$$' -fuzz "^$$name\$$" -fuzztime '$(FUZZTIME)' . </dev/null) || exit 1; \
		done || exit 1; \
	done

# In the foreground, until Ctrl-C; `make services &` gives a prompt back.
services: servers
	@command -v redis-server >/dev/null || exit 1; \
	dir=$$(mktemp -d); pid=; trap 'kill $$pid 2>/dev/null; wait; rm -rf "$$dir"' EXIT; trap 'exit 0' INT TERM; \
	for port in 6390 6391 6392 6393 6394 6395 6396 6397 6398 6399; do \
		redis-server --port $$port --bind 127.0.0.1 --dir "$$dir" --save '' --appendonly no >"$$dir/log" 2>&1 & pid=$$!; \
		while kill -0 $$pid 2>/dev/null; do \
			if redis-cli -p $$port info server 2>/dev/null | grep -q "^process_id:$$pid[^0-9]"; then \
				echo "Redis listens on 127.0.0.1:$$port. It ends with Ctrl-C, or with: kill $$pid"; \
				wait $$pid; exit 0; \
			fi; \
			sleep 0.05; \
		done; \
	done; \
	echo 'no Redis could be started:'; tail -n 5 "$$dir/log"; exit 1
