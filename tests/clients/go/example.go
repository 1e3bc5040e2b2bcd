// The generated client. The server's address is the first argument, the API key in API_KEY.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	attention "example.com/attention/client"
)

func main() {
	configuration := attention.NewConfiguration()
	configuration.Servers[0].URL = os.Args[1]
	api := attention.NewAPIClient(configuration).AttentionAPI
	key := context.WithValue(context.Background(), attention.ContextAccessToken, os.Getenv("API_KEY"))

	request := attention.AttentionRequest{
		Query: [][]float64{{8.7, 3.2, 4.1}, {2.1, 9.9, 1.6}},
		Key:   [][]float64{{9.1, 1.0, 2.1}, {0.1, 7.5, 4.3}, {1.3, 5.5, 8.2}, {7.6, 2.4, 4.0}, {8.5, 2.7, 2.7}},
		Value: [][]float64{{3.4, 1.3, 0.4, 9.8}, {7.5, 3.9, 4.1, 0.2}, {8.3, 2.8, 2.3, 0.1}, {1.6, 8.4, 9.9, 3.4},
			{2.2, 9.4, 8.7, 1.1}},
	}
	answer, _, err := api.ComputeAttention(key).AttentionRequest(request).Execute()
	if err != nil {
		panic(err)
	}
	rows := answer.Output.([]interface{}) // nested lists, unless `encoding` asks for base64
	if row := rows[0].([]interface{}); len(row) != 4 {
		panic(row)
	}
	output, _ := json.Marshal(rows)
	fmt.Println(string(output))

	request.Key = request.Value // four features, the query has three
	_, _, err = api.ComputeAttention(key).AttentionRequest(request).Execute()
	var failure *attention.GenericOpenAPIError
	if !errors.As(err, &failure) {
		panic(err)
	}
	switch problem := failure.Model().(attention.Problem); problem.Code {
	case attention.PROBLEMCODE_SHAPE_MISMATCH:
		fmt.Println(problem.Code, problem.Errors[0].Pointer)
	default:
		panic(problem.Code)
	}
}
