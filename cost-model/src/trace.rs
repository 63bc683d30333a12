//! Timelines as Chrome trace JSON, which Perfetto reads: a process per stage, a thread per
//! stream, complete events in microseconds.

use crate::TimelineEvent;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Writes at most `max_events` of `events` (in their order) as a trace. `otherData` says how
/// many were left out.
pub fn chrome_trace(events: &[TimelineEvent], max_events: usize) -> String {
    let shown = &events[..events.len().min(max_events)];
    let mut lanes: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for e in shown {
        let of_stage = lanes.entry(e.stage.0).or_default();
        if !of_stage.contains(&e.stream.as_str()) {
            of_stage.push(&e.stream);
        }
    }
    lanes
        .values_mut()
        .for_each(|names| names.sort_by_key(|n| lane_order(n)));
    let mut all: Vec<Value> = lanes
        .iter()
        .flat_map(|(&s, names)| named(s, names))
        .collect();
    let tid = |e: &TimelineEvent| lanes[&e.stage.0].iter().position(|n| *n == e.stream);
    all.extend(shown.iter().map(|e| event(e, tid(e).unwrap_or(0))));
    json!({
        "displayTimeUnit": "ms",
        "otherData": { "events_left_out": events.len() - shown.len() },
        "traceEvents": all,
    })
    .to_string()
}

/// Kernels stand first, transfers last.
fn lane_order(name: &str) -> (u8, &str) {
    let rank = match name {
        "kernels" => 0,
        "transfers" => 2,
        _ => 1,
    };
    (rank, name)
}

fn named(stage: u32, names: &[&str]) -> Vec<Value> {
    let meta = |name: &str, tid: usize, value: &str| json!({ "ph": "M", "pid": stage, "tid": tid, "name": name, "args": { "name": value } });
    let mut all = vec![meta("process_name", 0, &format!("stage {stage}"))];
    all.extend(
        names
            .iter()
            .enumerate()
            .map(|(i, s)| meta("thread_name", i, s)),
    );
    all
}

fn event(e: &TimelineEvent, tid: usize) -> Value {
    json!({
        "ph": "X",
        "pid": e.stage.0,
        "tid": tid,
        "name": e.name,
        "ts": e.start_s * 1e6,
        "dur": e.duration_s * 1e6,
        "args": { "microbatch": e.microbatch, "template": e.template, "instruction": e.instruction },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::StageId;

    #[test]
    fn events_become_complete_events_and_the_rest_is_counted() {
        let e = TimelineEvent {
            stage: StageId(1),
            stream: "transfers".into(),
            template: 3,
            instruction: Some(2),
            microbatch: Some(7),
            name: "send \"h.0\"".into(),
            start_s: 0.001,
            duration_s: 2e-6,
        };
        let trace: Value = serde_json::from_str(&chrome_trace(&[e.clone(), e], 1)).unwrap();
        assert_eq!(trace["otherData"]["events_left_out"], 1);
        let events = trace["traceEvents"].as_array().unwrap();
        // A process name, a thread name, an event.
        assert_eq!(events.len(), 3);
        let last = &events[2];
        assert_eq!(
            (last["pid"].as_u64(), last["tid"].as_u64()),
            (Some(1), Some(0))
        );
        assert_eq!(
            (last["ts"].as_f64(), last["dur"].as_f64()),
            (Some(1000.0), Some(2.0))
        );
        assert_eq!(last["args"]["microbatch"], 7);
        assert_eq!(last["name"], "send \"h.0\"");
    }
}
