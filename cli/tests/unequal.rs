//! Clusters of unequal hosts, through the binary.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use support::Place;

const CLUSTER: &str =
    "h100-sxm*2+nvlink4+infiniband-ndr*2:1,a100-sxm-40gb*2+nvlink3+infiniband-hdr*2:1";

#[test]
fn a_plan_for_two_groups_is_compiled_checked_and_played() {
    let place = Place::new();
    let file = place.run(&["presets", CLUSTER]).expect(0).out;
    // Of the second group one device is gone, and the link of the first has a half left.
    let head = "missing = [{ host = 1, device = 0 }]\ndegraded = [{ host = 0, level = \"infiniband\", share = 0.5 }]\n";
    place.write("mixed.toml", format!("{head}{file}"));
    let compile = |pins: &str| {
        let args = [
            "compile",
            "config.json",
            "--cluster",
            "mixed.toml",
            "--pin",
            pins,
        ];
        place.run(&args)
    };
    let done = compile("pipeline=2 microbatch=1").expect(0);
    for words in [
        "on 3 of the 3 devices",
        "Stage 0: ranks 0 to 1 in group 0 (NVIDIA H100",
        "Stage 1: rank 2 in group 1 (NVIDIA A100",
    ] {
        assert!(done.out.contains(words), "{words}: {}", done.out);
    }
    let inspected = place.run(&["inspect", "plan.json", "--json"]).expect(0).out;
    let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
    assert_eq!(inspected["stages"][1]["groups"], serde_json::json!([1]));
    place.run(&["check", "plan.json"]).expect(0);
    place.run(&["simulate", "plan.json"]).expect(0);
    // A plan whose cluster loses another device names ranks that are no longer there.
    let mut plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    plan["cluster"]["missing"] =
        serde_json::json!([{ "host": 1, "device": 0 }, { "host": 1, "device": 1 }]);
    place.write("fewer.json", plan.to_string());
    let refused = place.run(&["check", "fewer.json"]);
    assert_ne!(refused.code, 0);
    // Its memory is that of the place.
    let mut plan: serde_json::Value = serde_json::from_slice(&place.read("plan.json")).unwrap();
    let device = &mut plan["cluster"]["groups"][0]["device"];
    device["memory_bytes"] =
        serde_json::json!(device["memory_reserved_bytes"].as_u64().unwrap() + 4096);
    place.write("small.json", plan.to_string());
    place
        .run(&["check", "small.json"])
        .expect(5)
        .says(&["at most 4.00 KiB (4096 bytes)"]);
}

#[test]
fn slips_in_unequal_clusters_are_named() {
    let place = Place::new();
    let file = place.run(&["presets", CLUSTER]).expect(0).out;
    let said = |head: &str, words: &str| {
        place.write("wrong.toml", format!("{head}\n{file}"));
        let args = ["compile", "config.json", "--cluster", "wrong.toml"];
        place.run(&args).expect(3).says(&["wrong.toml:1:", words]);
    };
    said(
        "missing = [{ host = 0, device = 2 }]",
        "missing[0].device is 2, expected a device of the 2 of host 0, from 0",
    );
    said("missing = [{ host = 0, devise = 1 }]", "devise");
    said(
        "degraded = [{ host = 0, level = \"nvlink\", share = 1.5 }]",
        "degraded[0].share is 1.5, expected more than 0, at most 1",
    );
    let compile = |cluster: &str, more: &[&str]| {
        let args = ["compile", "config.json", "--cluster", cluster];
        place.run(&[&args, more].concat())
    };
    compile("dgx-h100:two,dgx-a100-40gb", &[])
        .expect(3)
        .says(&["`dgx-h100:two` has no number behind `:`"]);
    compile("dgx-h100:2,", &[])
        .expect(3)
        .says(&["a comma has no group of hosts on one side"]);
    compile("dgx-h100,dgx-a100-44gb", &[])
        .expect(3)
        .says(&["there is no cluster `dgx-a100-44gb`"]);
    compile("dgx-h100,dgx-a100-40gb", &["--hosts", "3"])
        .expect(2)
        .says(&["its hosts are not all equal", "behind its name"]);
    compile("h100-sxm*8+nvlink4,dgx-a100-40gb", &[])
        .expect(3)
        .says(&["no link joins `h100-sxm*8+nvlink4` to other hosts"]);
}
