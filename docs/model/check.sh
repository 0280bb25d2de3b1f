#!/usr/bin/env bash
# Searches the model in refill.pml to its end: first as it is, where no error may be found, then once for each rule with
# that rule taken out, where the known error must be found. It prints a table, and fails if any row differs from that.
# It needs spin 6.5 and gcc. Without them it says so and checks nothing; with REFILL_NO_SKIP=1 that is a failure.
set -euo pipefail
export LC_ALL=C

for tool in spin gcc; do
	if ! command -v "$tool" >/dev/null; then
		echo "$tool is not installed: the model is not checked"
		[ "${REFILL_NO_SKIP:-}" != 1 ] || exit 1
		exit 0
	fi
done

here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0
began=$SECONDS

# search GCC-FLAGS PAN-FLAGS -D...: leaves pan's report in $work/report. The limits are 900 MB and 60 s.
search() {
	local cflags=$1 flags=$2
	shift 2
	rm -rf "$work/pan" && mkdir "$work/pan"
	(
		cd "$work/pan"
		spin -a "$@" "$here/refill.pml" >../spin.log 2>&1 || { cat ../spin.log >&2; exit 1; }
		# shellcheck disable=SC2086
		gcc $cflags -w -DMEMLIM=900 -o pan pan.c
		# shellcheck disable=SC2086
		timeout 60 ./pan $flags >../report 2>&1 || true # the report says what it found
	)
}

# states prints the number of states of the last search.
states() { sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' "$work/report" | tail -n 1; }

row() { printf '%-4s %10s  %-56s %s\n' "$@"; }

bad() {
	row FAIL "$(states)" "$1" "$2"
	head -n 12 "$work/report" | sed 's/^/     | /'
	status=1
}

# complete: the search has visited all states. A search that was cut short is not complete.
cut_short='max search depth too small|Search not completed|aborting|out of memory|reached -D?MEMLIM|interrupted'
complete() {
	[ -n "$(states)" ] &&
		! grep -Eq "$cut_short" "$work/report"
}

# clean GCC-FLAGS PAN-FLAGS TITLE -D...: a complete search finds nothing.
clean() {
	local cflags=$1 flags=$2 title=$3
	shift 3
	search "$cflags" "$flags" "$@"
	if complete && grep -q 'errors: 0$' "$work/report"; then
		row ok "$(states)" "${*#-D}" "$title"
	else
		bad "${*#-D}" "$title"
	fi
}

# holds TITLE -D...: no state violates an assertion, and every run ends with every Get answered.
holds() { clean '-O1 -DSAFETY' '-m20000 -w21' "$@"; }

# ends TITLE -D...: no run goes in circles, so with the rows above every Get ends. Renewals are left out (CYCLES).
ends() { clean '-O1 -DNP' '-l -m20000 -w21' "$@"; }

# breaks TITLE ASSERTION -D...: exactly that assertion fails.
breaks() {
	local title=$1 want=$2
	shift 2
	search '-O0 -DSAFETY' '-m20000 -w18' "$@"
	# the blanks that pan prints vary
	if tr -d ' ' <"$work/report" | grep -F "assertionviolated${want// /}" >/dev/null; then
		row ok "$(states)" "${*#-D}" "$title"
	else
		bad "${*#-D}" "$title: not found"
	fi
}

row '' states options 'as it is: holds'
holds 'G1 G2 G3 G6: loads that fail or are abandoned' -DFAILS
holds 'G1 G2 G3 G6: the same, four Gets in one back-off' -DFAILS -DLASTING -DGETS=4
holds 'G1 G2 G3 G6: the same with three nodes' -DFAILS -DNODES=3
holds 'G1 G2 G3: stale values served and refreshed' -DSTALE -DTTL=1 -DAT=1
holds 'G1 G2 G3: stale values, not all of them served' -DSTALE -DERROR_ONLY -DTTL=2
holds 'G1 G2 G3: three nodes, four Gets' -DNODES=3 -DGETS=4
holds 'G1: three nodes, loads longer than TTL' -DNODES=3 -DINVALIDATIONS=0 -DTTL=2
holds 'G1: large records, four Gets' -DLARGE -DTTL=1 -DGETS=4 -DINVALIDATIONS=0
holds 'G1 G2 G3: Expire' -DEXPIRE -DSTALE
holds 'G2 G3 G4: lease and claim run out at any moment' -DFAULTS
holds 'G2 G3 G4: the same with stale values' -DFAULTS -DSTALE -DERROR_ONLY -DTTL=1
holds 'G2 G3 G4: the same with Expire' -DFAULTS -DEXPIRE -DSTALE
holds 'G1 G2 G3 G4: a node dies' -DDEATH -DGETS=4
holds 'G2: a subscription breaks and returns' -DLOSSY=1 -DAT=1
holds 'G2 G3: a node loses the store, and gets it back' -DCUT -DFAULTS -DGETS=2
holds 'G2 G3: the same, and the other node invalidates' -DCUT -DFAULTS -DGETS=2 -DAT=1
holds 'G3: the same with three Gets and stale values' -DCUT -DFAULTS -DSTALE -DTTL=1 -DINVALIDATIONS=0
ends 'G4: no Get runs for ever' -DCYCLES -DFAILS

echo
row '' states options 'one rule taken out: found'
answered='(saw[rec]>=wants[me])'
hit='((saw[l1[n]]>=promised[n])&&(saw[l1[n]]>=promisedL1[n]))'
stored='(saw[me]>=invalidBelow)'
newer='(began[me]>lastStored)'
single='((claim==0)||dead['
none='!((((value!=0)&&!(aged[value]))&&!(markedStale)))'
futile='((phase[lease]!='
sick='(hasFailed[n]||(sick>=2))'
noted='((lease>50)&&(lease<100))'
asleep=0
breaks 'G3: an overtaken filler stores over a newer value' "$newer" -DNO_CLAIM_CHECK -DFAULTS -DINVALIDATIONS=0
breaks 'G2: a load from before the Invalidate is stored' "$stored" -DNO_CLAIM_CHECK
breaks 'the same' "$stored" -DINVALIDATE_KEEPS_CLAIM
breaks 'the same with Expire' "$stored" -DINVALIDATE_KEEPS_CLAIM -DEXPIRE -DSTALE
breaks 'G2: a Get waits for a load that cannot be stored' "$futile" -DINVALIDATE_KEEPS_LEASE
breaks 'the same' "$futile" -DRENEW_CREATES
breaks 'G2: a Get joins a flight from before the Invalidate' "$answered" -DNO_DETACH
breaks 'the same after a break of the subscription' "$answered" -DRETURN_KEEPS_FLIGHT -DLOSSY=1 -DAT=1
breaks 'G2: L1 serves an invalidated value' "$hit" -DDROP_BEFORE_SCRIPT
breaks 'the same' "$hit" -DWAIT_FOR_OWN_ANNOUNCEMENT
breaks 'the same' "$hit" -DEPOCH_AT_INSERT
breaks 'the same' "$hit" -DFILL_OVER_ANY
breaks 'the same' "$hit" -DBREAK_KEEPS_EPOCH -DLOSSY=1 -DAT=1
breaks 'G2: a Get is answered with an invalidated value' "$answered" -DWAITER_TAKES_ANY -DFAULTS
breaks 'G1: a second load although there is a fresh value' "$none" -DNO_VALUE_CHECK
breaks 'G1: two loads at a time' "$single" -DNO_LEASE_CHECK
breaks 'G6: a load before the back-off is over' '!(backingOff)' -DNO_BACKOFF -DFAILS
breaks 'G6: the failures of one node fail another node' "$sick" -DFIRST_FAILURE_HOLDS_ALL -DFAILS
breaks 'the same' "$sick" -DFIRST_FAILURE_ANSWERS -DFAILS
breaks 'G6: three loads in one back-off' '(asked<=2)' -DHELD_BACK_LOADS -DFAILS
breaks 'the same' '(asked<=2)' -DNOTE_NOT_TOLD -DFAILS -DNODES=3
breaks 'G6: an error although another node may load' "$noted" -DHELD_BACK_DOES_NOT_LOOK -DFAILS
breaks 'the same' "$noted" -DLOOK_BELIEVES_MEMORY -DFAILS
breaks 'an error from before the Invalidate' '(saw[(lease-100)]>=wants[me])' -DINVALIDATE_KEEPS_BACKOFF -DFAILS
breaks 'the same' '(saw[heldBack[n]]>=wants[me])' -DINVALIDATE_KEEPS_MEMORY -DFAILS
breaks 'the same' '(saw[heldBack[n]]>=wants[me])' -DNOTE_KEEPS_BACKOFF -DFAILS -DLASTING -DGETS=4
breaks 'L1 serves a value that a newer record replaced' '(((saw[l1[n]]>=saw[value])||' \
	-DUNCONFIRMED_IS_HIT -DCUT -DFAULTS -DINVALIDATIONS=0
breaks 'a Get gets an older value than the Get before' "$answered" -DSTORED_FIRST -DCUT -DFAULTS -DINVALIDATIONS=0
breaks 'G2: a Get does not see the Invalidate of its node' "$answered" -DPENDING_LAST -DCUT -DFAULTS -DGETS=2
breaks 'G4: a lease is left behind' '(lease!=me)' -DREJECT_KEEPS_LEASE -DFAULTS
breaks 'G4: a Get sleeps although the lease is free' "$asleep" -DSILENT_REJECT -DFAULTS
breaks 'the same' "$asleep" -DSILENT_CHANGED -DSTALE -DERROR_ONLY -DTTL=2 -DGETS=4 -DINVALIDATIONS=0
breaks 'the same' "$asleep" -DSILENT_RELEASE -DFAILS
breaks 'the same' "$asleep" -DNO_AWAITED_CHECK
breaks 'the same' "$asleep" -DLEASE_SET_AGAIN -DSTALE -DTTL=1

echo
if [ $status = 0 ]; then echo "model: every row is as expected, $((SECONDS - began)) s"; else echo 'model: FAILED'; fi
exit $status
