//! The generated client. The server's address is the first argument, the API key in API_KEY.
use attention::apis::{attention_api::*, configuration::Configuration, Error};
use attention::models::{AttentionRequest, ProblemCode};
use serde_json::json;

fn main() {
    let address = std::env::args().nth(1).expect("the server's address");
    let key = std::env::var("API_KEY").ok();
    let configuration = Configuration { base_path: address, bearer_access_token: key, ..Configuration::default() };

    // The first Some: the field is sent; the second: it is not null.
    let mut request = AttentionRequest {
        query: Some(Some(json!([[8.7, 3.2, 4.1], [2.1, 9.9, 1.6]]))),
        key: Some(Some(json!([
            [9.1, 1.0, 2.1], [0.1, 7.5, 4.3], [1.3, 5.5, 8.2], [7.6, 2.4, 4.0], [8.5, 2.7, 2.7]
        ]))),
        value: Some(Some(json!([
            [3.4, 1.3, 0.4, 9.8], [7.5, 3.9, 4.1, 0.2], [8.3, 2.8, 2.3, 0.1], [1.6, 8.4, 9.9, 3.4], [2.2, 9.4, 8.7, 1.1]
        ]))),
        ..AttentionRequest::default()
    };
    let answer = compute_attention(&configuration, request.clone()).expect("an answer");
    let output = answer.output.expect("an output");
    assert!(output[0][1].is_f64());
    println!("{output}");

    request.key = request.value.clone(); // four features, the query has three
    let error = match compute_attention(&configuration, request) {
        Err(Error::ResponseError(error)) => error,
        other => panic!("{other:?}"),
    };
    match error.entity {
        // The variant is that of the first status, as all problems look alike; `error.status` has the status.
        Some(ComputeAttentionError::Status400(problem)) => match problem.code {
            ProblemCode::ShapeMismatch => println!("{} {}", problem.code, problem.errors[0].pointer),
            other => panic!("{other}"),
        },
        other => panic!("{other:?}"),
    }
}
